// A recording in a file, in the Trace Event Format that Chrome's tracing and Perfetto read: a JSON
// array with an event in each line.
//
// Each communicator is one of its processes, each row a thread. Times are microseconds since the
// recording began. Two events of metadata are our own: "sparsecomm_recording" (the rank, and what
// time it was when the recording began) and "sparsecomm_communicator" (its ranks). The file is
// written while the recording goes on; without its last line, after a crash, it can be read too.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/runtime.h"
#include "engine/timeline.h"

namespace sparsecomm {

class TimelineFile final : public TimelineRecorder {
 public:
  // Events that wait to be written: what comes beyond is lost, and counted.
  explicit TimelineFile(std::size_t most_waiting = std::size_t{1} << 18)
      : most_waiting_(most_waiting) {}
  // Ends the recording. A forked child leaves it to its parent.
  ~TimelineFile() override;

  // Begins a recording of the process of that rank. Throws InvalidArgument if one is going on, and
  // Error if the file cannot be written, or another process is writing it.
  void start(std::string const& path, int rank);
  // Ends the recording, if one is going on. Throws Error if the file lacks something.
  void stop();

  void add_communicator(std::uint32_t recording, std::uint32_t communicator,
                        RecordedGroup const& group, int rank) override;
  void add_row(std::uint32_t recording, std::uint32_t communicator, std::uint32_t row,
               std::string_view name) override;
  void add(std::uint32_t recording, TimelineEvent const& event) noexcept override;

 private:
  // So many are written at once, or those of such a time.
  static constexpr std::size_t batch = 4096;
  static constexpr Duration period = std::chrono::milliseconds(500);

  struct FileCloser {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  bool is_current(std::uint32_t recording) const;
  void append_metadata(std::uint32_t communicator, std::uint32_t row, std::string_view name,
                       std::string const& arguments);
  void write();

  std::size_t const most_waiting_;
  std::mutex starting_;  // is held while a recording begins or ends
  std::mutex mutex_;     // guards what follows
  std::unique_ptr<Condition> changed_ = std::make_unique<Condition>(Runtime(), "events to write");
  bool ending_ = false;
  std::uint32_t recordings_ = 0;
  std::string metadata_;  // lines
  std::vector<TimelineEvent> events_;
  std::uint64_t lost_ = 0;
  // Of the writer, while a recording goes on.
  std::string path_;
  TimePoint began_{};
  std::unique_ptr<std::FILE, FileCloser> file_;
  bool broken_ = false;
  std::unique_ptr<std::thread> writer_;
  pid_t owner_ = 0;  // the process that has the writer
};

}  // namespace sparsecomm
