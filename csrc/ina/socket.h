// TCP sockets by name. None of them blocks, is inherited by a program that is executed, or waits to
// gather small messages.
#pragma once

#include <cerrno>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "base/clock.h"
#include "base/error.h"
#include "transport/process.h"

namespace sparsecomm {

// An address that does not resolve, cannot be listened at, or does not answer.
class AddressError : public Error {
 public:
  using Error::Error;
};

// "HOST:PORT", "[::1]:PORT" for IPv6. Throws InvalidArgument for anything else.
struct HostPort {
  std::string host, port;
  static HostPort parse(std::string_view text);
};

// Throws AddressError with the address and what the system says. Tries all that the name resolves
// to, in its order.
FileDescriptor connect_to(std::string const& address, Deadline const& deadline);
// An empty host is any of this machine, port 0 a free one.
FileDescriptor listen_at(std::string const& address);
// Of a listening socket; not open if there is no connection, or it has gone already. Throws Error
// if the system has no room for more.
FileDescriptor accept_from(FileDescriptor const& listener);

// "HOST:PORT" in digits.
std::string local_address(FileDescriptor const& socket);
std::string peer_address(FileDescriptor const& socket);

// The system's words for an error.
inline std::string system_text(int error = errno) { return std::system_category().message(error); }

// How long poll() and epoll_wait() may sleep before the deadline, or an interrupt that is asked
// now and then, is looked at again.
int poll_milliseconds(Deadline const& deadline);
// Waits until the file is readable, or writable. False: the deadline has passed.
bool wait_readable(int file, Deadline const& deadline);
bool wait_writable(int file, Deadline const& deadline);

}  // namespace sparsecomm
