// Whether a process on this machine still runs: shared memory does not tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace sparsecomm {

// An open file that is closed with its owner.
class FileDescriptor {
 public:
  explicit FileDescriptor(int value = -1) : value_(value) {}
  FileDescriptor(FileDescriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  FileDescriptor(FileDescriptor const&) = delete;
  FileDescriptor& operator=(FileDescriptor const&) = delete;
  ~FileDescriptor();

  int get() const { return value_; }
  bool open() const { return value_ >= 0; }
  // Leaves it open, to somebody else.
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

// Names a process among all that this kernel has started.
struct ProcessIdentity {
  std::string host;  // this boot of this kernel, and the namespace of its process ids
  std::uint64_t pid = 0;
  std::uint64_t started = 0;  // clock ticks since boot: a process id is given out again

  static ProcessIdentity own();
  // "host pid started"; parse() gives nothing where the text is no identity.
  std::string text() const;
  static std::optional<ProcessIdentity> parse(std::string const& text);
  bool same_host(ProcessIdentity const& other) const { return host == other.host; }
};

// Says what to do where this process may not open `more` files than it has; empty where it may.
std::string descriptor_problem(std::size_t more);

// Becomes readable when the process ends (pidfd_open(2)). Not open for processes of other hosts,
// for this one, and before Linux 5.3.
FileDescriptor watch_process(ProcessIdentity const& process);
// Whether a process of this host has ended, as far as the system tells.
bool has_ended(ProcessIdentity const& process);

}  // namespace sparsecomm
