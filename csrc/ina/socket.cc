#include "ina/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>

namespace sparsecomm {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(std::string const& address, int flags) {
  HostPort const parts = HostPort::parse(address);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  char const* host = parts.host.empty() ? nullptr : parts.host.c_str();
  int const error = ::getaddrinfo(host, parts.port.c_str(), &hints, &found);
  require<AddressError>(error == 0, "address ", address, ": ",
                        error == EAI_SYSTEM ? system_text() : ::gai_strerror(error));
  return {found, &::freeaddrinfo};
}

FileDescriptor open_socket(addrinfo const& to) {
  return FileDescriptor(
      ::socket(to.ai_family, to.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, to.ai_protocol));
}

// Small messages leave at once, and a host that has vanished is noticed within a minute or two.
void set_up(int file) {
  auto const set = [file](int level, int name, int value) {
    ::setsockopt(file, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 60000);
}

// What is wrong; empty if the connection stands.
std::string connect_one(FileDescriptor const& socket, addrinfo const& to,
                        Deadline const& deadline) {
  if (!socket.open()) return system_text();
  if (::connect(socket.get(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return system_text();
    if (!wait_writable(socket.get(), deadline)) {
      return concat("no answer within ", deadline.allowance_seconds(), " s");
    }
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return system_text(error);
  }
  set_up(socket.get());
  return {};
}

bool wait_for(int file, short events, Deadline const& deadline) {
  for (;;) {
    pollfd watched{.fd = file, .events = events, .revents = 0};
    if (::poll(&watched, 1, poll_milliseconds(deadline)) > 0) return true;
    deadline.poll_interrupt(steady_clock().now());
    if (deadline.passed()) return false;
  }
}

std::string text_of(sockaddr_storage const& address, socklen_t size) {
  std::array<char, NI_MAXHOST> host;
  std::array<char, NI_MAXSERV> port;
  int const error =
      ::getnameinfo(reinterpret_cast<sockaddr const*>(&address), size, host.data(), host.size(),
                    port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  if (error != 0) return "an unknown address";
  std::string_view const name = host.data();
  bool const six = name.find(':') != std::string_view::npos;
  return concat(six ? "[" : "", name, six ? "]:" : ":", port.data());
}

}  // namespace

HostPort HostPort::parse(std::string_view text) {
  HostPort parts;
  std::size_t const colon = text.rfind(':');
  if (colon != std::string_view::npos) {
    parts.host = text.substr(0, colon);
    parts.port = text.substr(colon + 1);
  }
  bool const bracketed =
      parts.host.size() >= 2 && parts.host.front() == '[' && parts.host.back() == ']';
  if (bracketed) parts.host = parts.host.substr(1, parts.host.size() - 2);
  bool const digits =
      !parts.port.empty() && parts.port.size() <= 5 &&
      std::ranges::all_of(parts.port, [](char c) { return c >= '0' && c <= '9'; }) &&
      std::stoi(parts.port) <= 65535;
  require(digits && (bracketed || parts.host.find(':') == std::string::npos), "address is \"", text,
          "\", must be HOST:PORT or [IPV6]:PORT, with a port up to 65535");
  return parts;
}

FileDescriptor connect_to(std::string const& address, Deadline const& deadline) {
  Addresses const found = resolve(address, 0);
  std::string problem;
  for (addrinfo const* to = found.get(); to != nullptr; to = to->ai_next) {
    FileDescriptor socket = open_socket(*to);
    problem = connect_one(socket, *to, deadline);
    if (problem.empty()) return socket;
  }
  throw AddressError(concat("cannot connect to ", address, ": ", problem));
}

FileDescriptor listen_at(std::string const& address) {
  Addresses const found = resolve(address, AI_PASSIVE);
  std::string problem;
  for (addrinfo const* at = found.get(); at != nullptr; at = at->ai_next) {
    FileDescriptor socket = open_socket(*at);
    int const on = 1;
    if (socket.open() &&
        ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
    problem = system_text();
  }
  throw AddressError(concat("cannot listen at ", address, ": ", problem));
}

FileDescriptor accept_from(FileDescriptor const& listener) {
  FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.open()) {
    set_up(socket.get());
  } else {
    require<Error>(errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM,
                   "cannot accept a connection: ", system_text());
  }
  return socket;
}

std::string local_address(FileDescriptor const& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return text_of(address, size);
}

std::string peer_address(FileDescriptor const& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return "an unknown address";
  }
  return text_of(address, size);
}

int poll_milliseconds(Deadline const& deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
  if (deadline.interruptible()) {
    left = std::min(left, std::chrono::ceil<std::chrono::milliseconds>(Interrupt::period));
  }
  return static_cast<int>(std::min<std::int64_t>(left.count(), 1 << 30));
}

bool wait_readable(int file, Deadline const& deadline) { return wait_for(file, POLLIN, deadline); }
bool wait_writable(int file, Deadline const& deadline) { return wait_for(file, POLLOUT, deadline); }

}  // namespace sparsecomm
