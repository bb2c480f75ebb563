#include "ina/tcp_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>
#include <vector>

#include "ina/greeting.h"
#include "ina/message_stream.h"
#include "ina/socket.h"
#include "transport/fork_guard.h"

namespace sparsecomm {
namespace {

void read_all(int file, std::span<std::byte> to, Deadline const& deadline) {
  while (!to.empty()) {
    require<AddressError>(wait_readable(file, deadline), "no answer to the greeting within ",
                          deadline.allowance_seconds(), " s: is it an aggregator?");
    ssize_t const read = ::recv(file, to.data(), to.size(), 0);
    if (read < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    require<AddressError>(read > 0,
                          "the connection has been closed without an answer to the "
                          "greeting: is it an aggregator?");
    to = to.subspan(static_cast<std::size_t>(read));
  }
}

// Says who connects; the socket is new, and takes that at once.
void greet(int file, JobMember const& member, Deadline const& deadline) {
  InaGreeting const greeting = make_greeting(member);
  ssize_t const sent = ::send(file, &greeting, sizeof(greeting), MSG_NOSIGNAL);
  require<AddressError>(sent == ssize_t(sizeof(greeting)),
                        "the greeting could not be sent: ", std::system_category().message(errno));
  std::array<std::byte, sizeof(InaAnswer)> answer;
  read_all(file, answer, deadline);
  std::string text(parse_answer(answer), '\0');
  read_all(file, std::as_writable_bytes(std::span(text)), deadline);
  require<AddressError>(text.empty(), text);
}

class TcpLink final : public AggregatorLink {
 public:
  TcpLink(std::span<const std::string> addresses, JobMember const& member, Deadline const& deadline)
      : events_(::epoll_create1(EPOLL_CLOEXEC)),
        interruption_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    require<Error>(events_.open() && interruption_.open(),
                   "epoll or eventfd: ", std::system_category().message(errno));
    watch(interruption_.get(), EPOLLIN, addresses.size());
    endpoints_.reserve(addresses.size());
    for (auto const& address : addresses) {
      FileDescriptor socket = connect_to(address, deadline);
      try {
        greet(socket.get(), member, deadline);
      } catch (Error const& error) {
        throw AddressError(concat("aggregator ", address, ": ", error.what()));
      }
      watch(socket.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, endpoints_.size());
      endpoints_.push_back(std::make_unique<Endpoint>(address, std::move(socket)));
    }
    guard_ = ForkGuard(events_.get());
  }
  // In a forked child, where the guard has closed them, the sockets' numbers are others' files.
  ~TcpLink() override {
    for (auto const& endpoint : endpoints_) {
      if (!endpoint->stream) continue;
      if (process_ == ::getpid()) {
        endpoint->lose("it was closed");
      } else {
        endpoint->socket.release();
      }
    }
  }

  int size() const override { return static_cast<int>(endpoints_.size()); }
  std::string const& address(int aggregator) const override { return at(aggregator).address; }
  std::string const& loss(int aggregator) const override { return at(aggregator).loss; }

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    Endpoint& endpoint = at(aggregator);
    if (!endpoint.stream) return;
    endpoint.stream->send(instance, message);
    notice(endpoint);
  }

  bool flushed(int aggregator) const override {
    auto const& stream = at(aggregator).stream;
    return !stream || stream->flushed();
  }
  bool flush(int aggregator, Deadline const& deadline) override {
    while (!flushed(aggregator)) {
      require_wanted();
      if (!wait(deadline)) return false;
    }
    return true;
  }

  Event next(Deadline const& deadline) override {
    for (;;) {
      require_wanted();
      for (std::size_t i = 0; i < endpoints_.size(); ++i) {
        std::size_t const index = (first_ + i) % endpoints_.size();
        Endpoint& endpoint = *endpoints_[index];
        if (endpoint.stream && endpoint.readable) {
          if (endpoint.stream->receive(endpoint)) {
            first_ = (index + 1) % endpoints_.size();
            return {Event::Kind::message, static_cast<int>(index), endpoint.instance,
                    endpoint.message};
          }
          endpoint.readable = false;
          notice(endpoint);
        }
        if (std::exchange(endpoint.to_be_told, false)) {
          return {Event::Kind::lost, static_cast<int>(index), 0, {}};
        }
      }
      if (!wait(deadline)) return {Event::Kind::late, 0, 0, {}};
    }
  }

  void close(int aggregator, std::string const& why) override {
    Endpoint& endpoint = at(aggregator);
    if (endpoint.stream) endpoint.lose(why);
  }

  void interrupt() noexcept override {
    interrupted_ = true;
    std::uint64_t const one = 1;
    [[maybe_unused]] ssize_t const written = ::write(interruption_.get(), &one, sizeof(one));
  }

 private:
  struct Endpoint final : MessageSink {
    Endpoint(std::string text, FileDescriptor connected)
        : address(std::move(text)), socket(std::move(connected)), stream(socket.get()) {}

    Place place(std::uint32_t number, std::size_t bytes, std::span<const std::byte>) override {
      require<MalformedFrame>(number < most_instances, "aggregation message: instance is ", number,
                              ", must be less than ", most_instances);
      if (buffer.size() < bytes) buffer.resize(bytes);
      return {std::span(buffer).first(bytes), nullptr};
    }
    void take(std::uint32_t number, std::span<const std::byte> bytes) override {
      instance = number;
      message = bytes;
    }
    // The other side is told, even if a program that was forked from this one holds the socket.
    void lose(std::string const& why) {
      loss = why;
      stream.reset();
      ::shutdown(socket.get(), SHUT_RDWR);
      socket = FileDescriptor();
    }

    std::string address;
    FileDescriptor socket;
    std::optional<MessageStream> stream;  // none once it is lost
    std::string loss;
    bool readable = false, to_be_told = false;
    std::vector<std::byte> buffer;
    std::uint32_t instance = 0;
    std::span<const std::byte> message;
  };

  Endpoint& at(int aggregator) const {
    require(aggregator >= 0 && aggregator < size(), "aggregator is ", aggregator,
            ", must be less than ", size());
    return *endpoints_[static_cast<std::size_t>(aggregator)];
  }

  void watch(int file, std::uint32_t events, std::size_t number) {
    epoll_event event{.events = events, .data = {.u64 = number}};
    require<Error>(::epoll_ctl(events_.get(), EPOLL_CTL_ADD, file, &event) == 0,
                   "epoll_ctl: ", std::system_category().message(errno));
  }

  static void notice(Endpoint& endpoint) {
    if (endpoint.stream->error().empty()) return;
    endpoint.lose(std::string(endpoint.stream->error()));
    endpoint.to_be_told = true;
  }

  void require_wanted() const {
    if (interrupted_) throw Interrupted("the wait for an aggregator was interrupted", {});
  }

  // False: the deadline has passed.
  bool wait(Deadline const& deadline) {
    std::array<epoll_event, 16> found;
    for (;;) {
      auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
      if (deadline.interruptible()) {
        left = std::min(left, std::chrono::ceil<std::chrono::milliseconds>(Interrupt::period));
      }
      int const timeout = static_cast<int>(std::min<std::int64_t>(left.count(), 1 << 30));
      int const count = ::epoll_wait(events_.get(), found.data(), int(found.size()), timeout);
      for (int i = 0; i < count; ++i) {
        auto const& event = found[static_cast<std::size_t>(i)];
        if (event.data.u64 == endpoints_.size()) continue;  // an interruption
        Endpoint& endpoint = *endpoints_[event.data.u64];
        if (!endpoint.stream) continue;
        if ((event.events & EPOLLOUT) != 0) endpoint.stream->flush();
        if ((event.events & ~std::uint32_t{EPOLLOUT}) != 0) endpoint.readable = true;
        notice(endpoint);
      }
      deadline.poll_interrupt(steady_clock().now());
      if (count > 0) return true;
      require_wanted();
      if (deadline.passed()) return false;
    }
  }

  pid_t const process_ = ::getpid();
  FileDescriptor events_, interruption_;
  std::atomic<bool> interrupted_ = false;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  ForkGuard guard_;
  std::size_t first_ = 0;  // asked first
};

}  // namespace

std::shared_ptr<AggregatorLink> connect_aggregators(std::span<const std::string> addresses,
                                                    JobMember const& member,
                                                    Deadline const& deadline) {
  require(!addresses.empty(), "no address of an aggregator; give one or more, HOST:PORT");
  return std::make_shared<TcpLink>(addresses, member, deadline);
}

}  // namespace sparsecomm
