// The log of the program: lines of text, or of JSON, by spdlog.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "daemon/command_line.h"
#include "daemon/log_entry.h"

namespace spdlog {
class async_logger;
namespace details {
class thread_pool;
}  // namespace details
}  // namespace spdlog

namespace sparsecomm {

// Any thread may write, and waits for no disk or reader: another thread does. What cannot be
// written, since a disk is full, is lost, and of what waits the oldest beyond most_waiting.
class ProgramLog {
 public:
  // In one second, below errors; what is more is counted, and the number logged in the next.
  static constexpr std::uint64_t most_lines = 200;
  static constexpr std::size_t most_waiting = 4096;

  // Throws InvalidArgument if the file cannot be opened.
  explicit ProgramLog(LogSettings const& settings);
  ~ProgramLog();

  void write(LogEntry const& entry);

 private:
  void write_at_once(LogEntry const& entry);

  LogFormat const format_;
  std::shared_ptr<spdlog::details::thread_pool> writer_;
  std::shared_ptr<spdlog::async_logger> logger_;
  std::mutex mutex_;
  TimePoint second_;  // that is counted began then
  std::uint64_t lines_ = 0, left_out_ = 0;
};

}  // namespace sparsecomm
