// Who keeps the others waiting: said while they wait, long before a deadline makes it an error.
//
// A rank that makes no progress for the stall limit, be it in an operation or between two, says on
// the board where it is. One that waits for a peer then reads what the others have said and names
// those that have not come: each sees for itself only the peer whose message it needs next, which
// may be waiting as well.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/runtime.h"
#include "transport/transport.h"

namespace sparsecomm {

// Where a rank is.
struct Whereabouts {
  std::uint64_t operation = 0;  // the last that it began; 0: none yet
  bool running = false;         // that has not ended
  int awaited = nobody;         // the peer that it waits for, if any; see transport.h
  double seconds = 0;           // without any progress, when it said so
  std::string what;             // the operation, in words; empty where it is still being prepared
  std::string service = {};     // that it waits for, if `awaited` says so
};

std::string serialize_whereabouts(Whereabouts const& whereabouts);
// Null where the bytes are none of one of `size` ranks.
std::optional<Whereabouts> parse_whereabouts(std::string_view bytes, int size);

// A proposal in words: "gradient exchange of group 0 from weight, step 3".
std::string describe_proposal(std::string_view proposal);

// What `rank`, which waits, has to say of the others; [rank], null: nothing is known. `timeout`: of
// the operation.
std::string describe_stall(int rank, Whereabouts const& own,
                           std::span<const std::optional<Whereabouts>> others, Duration timeout);

struct StallOptions {
  Duration limit = std::chrono::seconds(60);
  // Called on a thread of the watch's own.
  std::function<void(std::string const&)> log;
};

// Of one communicator, whose thread says what it does. Speaks after the limit, and whenever a stall
// has become twice as long.
class StallWatch {
 public:
  // Whether this rank asks the others where they are, and logs it. Of more than 64 ranks one in
  // sqrt(P) does: each asks all, and they notice a stall at the same moment.
  static bool asks(int rank, int size);

  // The transport outlives the watch.
  StallWatch(Transport& transport, StallOptions options, Duration timeout, Runtime runtime = {});
  ~StallWatch();
  StallWatch(StallWatch const&) = delete;
  StallWatch& operator=(StallWatch const&) = delete;

  // As long as it lives, that operation runs. `watch` may be null.
  class Operation {
   public:
    Operation(StallWatch* watch, std::uint64_t number) : watch_(watch) {
      if (watch_ != nullptr) watch_->begin(number);
    }
    ~Operation() {
      if (watch_ != nullptr) watch_->end();
    }
    Operation(Operation const&) = delete;
    Operation& operator=(Operation const&) = delete;

   private:
    StallWatch* watch_;
  };

  // What the operation is; see Proposal and Comparison::show().
  void propose(std::string_view text, std::optional<std::uint64_t> step, std::string_view name,
               std::size_t others);
  std::thread::id thread() const { return thread_.get_id(); }
  // For good; does not wait for a message that is being logged.
  void stop();
  void join();  // once stopped: waits for that too

 private:
  // What changes when there is progress.
  struct Place {
    std::uint64_t operation = 0;
    bool running = false;
    int awaited = nobody;
    std::uint64_t waits = 0;

    friend bool operator==(Place const&, Place const&) = default;
  };
  void begin(std::uint64_t operation);
  void end();
  Place place() const;
  std::string describe_operation() const;
  void watch();
  void report(std::unique_lock<std::mutex>& lock, Place const& seen, Duration stalled);
  void post(std::unique_lock<std::mutex>& lock, std::string_view status);
  bool pause(std::unique_lock<std::mutex>& lock, Duration time);

  Transport& transport_;
  StallOptions options_;
  Duration timeout_;
  Runtime const runtime_;
  std::mutex mutex_;  // guards what follows
  Condition changed_{runtime_, "the end of the watch"};
  bool stopped_ = false;
  std::uint64_t operation_ = 0;
  bool running_ = false;
  std::string proposal_;
  std::optional<std::uint64_t> step_;
  std::string name_;
  std::size_t others_ = 0;
  std::thread thread_;  // last, so that it starts when all else is ready
};

}  // namespace sparsecomm
