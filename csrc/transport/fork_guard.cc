#include "transport/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace sparsecomm {
namespace {

constexpr int deepest = 3;  // UCX has a set of sets; no engine has deeper ones

// Calls use(socket) for each socket that the epoll set watches, as proc(5) tells: lines such as
// "tfd: 5 events: 19 data: 0 pos:0 ino:1a2b sdev:8". The inode says whether the descriptor still
// is what was added to the set. Async-signal-safe, since a forked child comes here.
template <class Use>
void for_each_socket(int event_set, Use&& use, int depth = 0) noexcept {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "/proc/self/fdinfo/%d", event_set);
  int const info = ::open(name.data(), O_RDONLY | O_CLOEXEC);
  if (info < 0) return;
  std::array<char, 4096> text{};
  std::size_t held = 0;
  for (;;) {
    ssize_t const came = ::read(info, text.data() + held, text.size() - 1 - held);
    if (came <= 0) break;
    held += static_cast<std::size_t>(came);
    text[held] = '\0';
    char* line = text.data();
    for (char* end = nullptr; (end = std::strchr(line, '\n')) != nullptr; line = end + 1) {
      *end = '\0';
      char const* const inode = std::strstr(line, "ino:");
      if (std::strncmp(line, "tfd:", 4) != 0 || inode == nullptr) continue;
      auto const watched = static_cast<int>(std::strtol(line + 4, nullptr, 10));
      struct stat found{};
      if (::fstat(watched, &found) != 0 || found.st_ino != std::strtoul(inode + 4, nullptr, 16)) {
        continue;
      }
      if (S_ISSOCK(found.st_mode)) {
        use(watched);
      } else if (depth < deepest && watched != event_set) {
        for_each_socket(watched, use, depth + 1);  // nothing where it is no set
      }
    }
    held -= static_cast<std::size_t>(line - text.data());
    std::memmove(text.data(), line, held);
  }
  ::close(info);
}

bool listens(int socket) noexcept {
  int value = 0;
  socklen_t size = sizeof value;
  return ::getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &value, &size) == 0 && value != 0;
}

// The sets of all guards. A handler of a fork takes no argument, so they are the process's; the
// handlers hold the lock over the fork.
struct Registry {
  std::mutex mutex;
  std::vector<int> event_sets;

  static Registry& get() {
    static auto& registry = *new Registry;  // a thread may fork while the process ends
    static bool const registered =
        ::pthread_atfork([] { registry.mutex.lock(); }, [] { registry.mutex.unlock(); },
                         [] {
                           for (int const event_set : registry.event_sets) {
                             for_each_socket(event_set, [](int socket) { ::close(socket); });
                           }
                           registry.mutex.unlock();
                         });
    static_cast<void>(registered);
    return registry;
  }
};

}  // namespace

ForkGuard::ForkGuard(int event_set) : event_set_(event_set) {
  Registry& registry = Registry::get();
  std::lock_guard const lock(registry.mutex);
  registry.event_sets.push_back(event_set);
}

ForkGuard::~ForkGuard() {
  if (event_set_ < 0) return;
  Registry& registry = Registry::get();
  std::lock_guard const lock(registry.mutex);
  std::erase(registry.event_sets, event_set_);
}

void ForkGuard::close_on_exec() const noexcept {
  if (event_set_ < 0) return;
  for_each_socket(event_set_, [](int socket) { ::fcntl(socket, F_SETFD, FD_CLOEXEC); });
}

std::map<int, std::size_t> listening_event_sets() {
  std::map<int, std::size_t> sets;
  std::error_code error;
  for (auto const& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone) != "anon_inode:[eventpoll]") continue;
    int const event_set = std::atoi(entry.path().filename().c_str());
    std::size_t sockets = 0, listening = 0;
    for_each_socket(event_set, [&](int socket) {
      ++sockets;
      listening += listens(socket) ? 1 : 0;
    });
    if (listening > 0) sets[event_set] = sockets;
  }
  return sets;
}

}  // namespace sparsecomm
