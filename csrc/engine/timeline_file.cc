#include "engine/timeline_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <new>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace sparsecomm {
namespace {

std::string quoted(std::string_view text) {
  constexpr char const* digits = "0123456789abcdef";
  std::string result = "\"";
  for (char const c : text) {
    auto const code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (code < 0x20) {
      result += "\\u00";
      result += digits[code >> 4];
      result += digits[code & 15];
    } else {
      result += c;
    }
  }
  return result + '"';
}

template <class Rep, class Period>
std::int64_t nanoseconds(std::chrono::duration<Rep, Period> time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

// Appends to a buffer without a look at its size: a line has room for its names and numbers.
class Line {
 public:
  Line& operator<<(std::string_view text) {
    end_ = std::ranges::copy(text, end_).out;
    return *this;
  }
  Line& operator<<(std::uint64_t number) {
    end_ = std::to_chars(end_, text_.data() + text_.size(), number).ptr;
    return *this;
  }
  // In microseconds.
  Line& operator<<(Duration time) {
    auto const count = static_cast<std::uint64_t>(nanoseconds(time));
    *this << count / 1000 << std::string_view(".");
    for (std::uint64_t const unit : {100u, 10u, 1u}) {
      *end_++ = static_cast<char>('0' + count / unit % 10);
    }
    return *this;
  }
  std::string_view text() const { return {text_.data(), end_}; }

 private:
  std::array<char, 400> text_;
  char* end_ = text_.data();
};

// Empty, for this process alone. Unbuffered, so that a forked child has nothing to write.
std::FILE* open_alone(std::string const& path) {
  int const file = ::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
  require<Error>(file >= 0, "the timeline cannot be written to ", path, ": ",
                 std::generic_category().message(errno));
  bool const is_alone = ::flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
  // A device cannot be truncated, and need not be.
  std::FILE* const opened =
      is_alone && (::ftruncate(file, 0) == 0 || errno == EINVAL) ? ::fdopen(file, "w") : nullptr;
  if (opened == nullptr) ::close(file);
  require<Error>(is_alone, "the timeline cannot be written to ", path,
                 ": another process is writing it; give each program a file of its own");
  require<Error>(opened != nullptr, "the timeline cannot be written to ", path);
  std::setvbuf(opened, nullptr, _IONBF, 0);
  return opened;
}

void append_event(std::string& out, TimelineEvent const& event, TimePoint began) {
  SliceEntry const& entry = describe(event.slice);
  // What began before the recording did is cut off.
  TimePoint const begin = std::max(event.begin, began);
  Line line;
  line << R"({"ph":"X","name":")" << entry.name << R"(","cat":"sparsecomm","pid":)"
       << std::uint64_t{event.communicator} << R"(,"tid":)" << std::uint64_t{event.row}
       << R"(,"ts":)" << begin - began << R"(,"dur":)"
       << std::max(event.end - begin, Duration::zero()) << R"(,"args":{)";
  std::string_view separator;
  for (std::size_t i = 0; i < entry.figures.size() && entry.figures[i] != nullptr; ++i) {
    line << std::exchange(separator, ",") << R"(")" << entry.figures[i] << R"(":)"
         << event.figures[i];
  }
  if (event.failed) line << separator << R"("failed":true)";
  out += (line << "}},\n").text();
}

}  // namespace

TimelineFile::~TimelineFile() {
  if (writer_ && owner_ != ::getpid()) {
    // The writer was not copied, but the condition was, with the writer waiting; the file is the
    // parent's.
    std::ignore = changed_.release();
    std::ignore = writer_.release();
    std::ignore = file_.release();
    return;
  }
  try {
    stop();
  } catch (std::exception const&) {
    // Whoever wants to know calls stop().
  }
}

void TimelineFile::start(std::string const& path, int rank) {
  std::lock_guard const starting(starting_);
  require(!writer_, "a timeline is being recorded to ", path_, "; end it before another one");
  std::unique_ptr<std::FILE, FileCloser> file(open_alone(path));
  {
    std::lock_guard const lock(mutex_);
    path_ = path;
    file_ = std::move(file);
    broken_ = ending_ = false;
    lost_ = 0;
    events_.clear();
    events_.reserve(std::min(most_waiting_, 4 * batch));
    metadata_ = "[\n";
    began_ = steady_clock().now();
    auto const unix_time = std::chrono::system_clock::now().time_since_epoch();
    append_metadata(0, 0, "sparsecomm_recording",
                    concat(R"("rank":)", rank, R"(,"unix_ns":)", nanoseconds(unix_time)));
    owner_ = ::getpid();
    writer_ = std::make_unique<std::thread>([this] { write(); });
    recording_ = ++recordings_;
  }
}

void TimelineFile::stop() {
  if (owner_ != 0 && owner_ != ::getpid()) return;
  std::lock_guard const starting(starting_);
  if (!writer_) return;
  recording_ = 0;
  {
    std::lock_guard const lock(mutex_);
    ending_ = true;
  }
  changed_->notify_all();
  writer_->join();
  writer_.reset();
  // Children may hold the file open.
  ::flock(::fileno(file_.get()), LOCK_UN);
  broken_ = std::fclose(file_.release()) != 0 || broken_;
  require<Error>(!broken_, "the timeline in ", path_,
                 " is not complete, since it could not be written; is the disk full?");
  require<Error>(lost_ == 0, "the timeline in ", path_, " lacks ", lost_,
                 " events, which came faster than they could be written; record fewer steps");
}

// With the lock held, as are those that call it.
bool TimelineFile::is_current(std::uint32_t recording) const {
  return recording != 0 && recording == recording_ && !ending_ && !broken_;
}

void TimelineFile::append_metadata(std::uint32_t communicator, std::uint32_t row,
                                   std::string_view name, std::string const& arguments) {
  metadata_ += concat(R"({"ph":"M","pid":)", communicator, R"(,"tid":)", row, R"(,"name":)",
                      quoted(name), R"(,"args":{)", arguments, "}},\n");
}

void TimelineFile::add_communicator(std::uint32_t recording, std::uint32_t communicator,
                                    RecordedGroup const& group, int rank) {
  std::string ranks;
  for (int const member : group.ranks) {
    ranks += concat(ranks.empty() ? "" : ",", member);
  }
  bool const known = static_cast<std::size_t>(rank) < group.ranks.size();
  std::string const title = concat(
      "rank ", known ? group.ranks[static_cast<std::size_t>(rank)] : rank, ": ", group.title);
  std::lock_guard const lock(mutex_);
  if (!is_current(recording)) return;
  append_metadata(communicator, 0, "process_name", concat(R"("name":)", quoted(title)));
  append_metadata(communicator, 0, "sparsecomm_communicator",
                  concat(R"("ranks":[)", ranks, R"(],"number":)", group.number));
}

void TimelineFile::add_row(std::uint32_t recording, std::uint32_t communicator, std::uint32_t row,
                           std::string_view name) {
  std::lock_guard const lock(mutex_);
  if (!is_current(recording)) return;
  append_metadata(communicator, row, "thread_name", concat(R"("name":)", quoted(name)));
  append_metadata(communicator, row, "thread_sort_index", concat(R"("sort_index":)", row));
}

void TimelineFile::add(std::uint32_t recording, TimelineEvent const& event) noexcept {
  std::lock_guard const lock(mutex_);
  if (!is_current(recording)) return;
  if (events_.size() == most_waiting_) {
    ++lost_;
    return;
  }
  try {
    events_.push_back(event);
  } catch (std::bad_alloc const&) {
    ++lost_;
  }
  if (events_.size() == batch) changed_->notify_all();
}

void TimelineFile::write() {
  std::vector<TimelineEvent> events;
  events.reserve(std::min(most_waiting_, 4 * batch));
  std::string text;
  for (bool ending = false; !ending;) {
    {
      std::unique_lock lock(mutex_);
      changed_->wait_for(lock, period, [this] {
        return ending_ || events_.size() >= batch || !metadata_.empty();
      });
      ending = ending_;
      text.clear();
      text.swap(metadata_);
      events.clear();
      events.swap(events_);
    }
    for (TimelineEvent const& event : events) append_event(text, event, began_);
    // A JSON array has no comma behind its last element.
    if (ending)
      text += R"({"ph":"M","pid":0,"tid":0,"name":"end","args":{}})"
              "\n]\n";
    if (broken_) continue;
    bool const written = std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
                         std::fflush(file_.get()) == 0;
    if (written) continue;
    std::lock_guard const lock(mutex_);
    broken_ = true;
  }
}

}  // namespace sparsecomm
