#include "daemon/program/control_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ina/socket.h"

namespace sparsecomm {
namespace {

constexpr int queue = 16;

FileDescriptor make_socket() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

FileDescriptor listen_at_path(std::string const& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  require(!path.empty() && path.size() < sizeof(address.sun_path), "--control \"", path, "\" has ",
          path.size(), " bytes, must have 1 to ", sizeof(address.sun_path) - 1);
  std::ranges::copy(path, address.sun_path);
  auto const* const named = reinterpret_cast<sockaddr const*>(&address);
  auto const check = [&](bool holds) {
    require<AddressError>(holds, "--control ", path, ": ", system_text());
  };
  struct stat there{};
  if (::lstat(path.c_str(), &there) == 0) {
    require<AddressError>(S_ISSOCK(there.st_mode), "--control ", path,
                          ": something is there that is no socket; name another path");
    FileDescriptor const other = make_socket();
    bool const stale = ::connect(other.get(), named, sizeof(address)) != 0 && errno == ECONNREFUSED;
    require<AddressError>(stale, "--control ", path,
                          ": another program listens there; name another path");
    check(::unlink(path.c_str()) == 0);
  }
  FileDescriptor socket = make_socket();
  check(socket.open());
  check(::fchmod(socket.get(), S_IRUSR | S_IWUSR) == 0);  // which Linux gives the file
  check(::bind(socket.get(), named, sizeof(address)) == 0);
  check(::listen(socket.get(), queue) == 0);
  return socket;
}

}  // namespace sparsecomm
