// An aggregator as a server over TCP and UCX: one thread, any number of jobs one after another and
// at once.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "daemon/log_entry.h"
#include "ina/greeting.h"
#include "ina/host.h"
#include "ina/message_path.h"
#include "ina/socket.h"

namespace sparsecomm {

// Says who has the token that the proof of a message was made with; empty: nobody.
using Authenticator =
    std::function<std::string(std::span<const std::byte> message, Proof const& proof)>;

struct AggregatorOptions {
  std::string listen;                            // HOST:PORT; port 0: a free one
  std::size_t memory = std::size_t{1} << 28;     // bytes, of the operations of all jobs
  std::size_t job_memory = 0;                    // of one job; 0: all of it
  Duration limit = std::chrono::seconds(60);     // of a round of an operation
  Duration idle = std::chrono::hours(1);         // after which a silent job is ended
  Duration greeting = std::chrono::seconds(10);  // within which a connection says who it is
  std::size_t connections = 1024;
  // UCX trusts those who connect.
  MessageOptions messages{.transport = MessageTransport::tcp, .ucx = {}};
  InaPolicy const* policy = &vote_policy;
  Authenticator authenticate = {};  // empty: no token is asked for
};

// Why a connection was closed.
enum class CloseCause : std::uint8_t {
  left,      // from outside, with or without a greeting
  silent,    // no greeting within the time for it
  greeting,  // nonsense, or another version
  token,     // it has none that is known, or shows none
  refused,   // of no job that there may be
  protocol,  // a message that is not valid
  replaced,  // by another of the same worker
  idle,      // its job was
  ended,     // its job was, by an operator
};
struct CloseCauseEntry {
  CloseCause cause;
  std::string_view name;
};
inline constexpr CloseCauseEntry close_cause_table[] = {
    {CloseCause::left, "left"},         {CloseCause::silent, "silent"},
    {CloseCause::greeting, "greeting"}, {CloseCause::token, "token"},
    {CloseCause::refused, "refused"},   {CloseCause::protocol, "protocol"},
    {CloseCause::replaced, "replaced"}, {CloseCause::idle, "idle"},
    {CloseCause::ended, "ended"},
};
constexpr std::span<const CloseCauseEntry> close_causes() { return close_cause_table; }

// An aggregator as it is now; what is counted, since it was started.
struct AggregatorReport {
  InaCounts counts;
  std::uint64_t begun_jobs = 0;
  std::array<std::uint64_t, std::size(close_cause_table)> closed{};  // [CloseCause], connections
  std::vector<InaJobReport> jobs;
  std::size_t connections = 0, most_connections = 0;
  std::size_t memory = 0, most_memory = 0;  // bytes that are admitted, and that may be
  TimePoint now;
  bool draining = false;
  bool ready() const { return !draining && connections < most_connections; }
};

// Its functions are for the thread that serves, unless they say otherwise.
class AggregatorServer final : private InaHost::Outlet {
 public:
  // Listens. Throws AddressError if that cannot be, and TransportUnavailable if messages are to go
  // over UCX, which cannot be used here.
  AggregatorServer(AggregatorOptions const& options, Log log);
  AggregatorServer(AggregatorServer const&) = delete;
  AggregatorServer& operator=(AggregatorServer const&) = delete;

  // In digits, with the port that was chosen.
  std::string const& address() const { return address_; }

  // Serves until stop(), or until it is drained.
  void run();
  // From any thread.
  void stop() noexcept;
  // Has the thread that serves run it: from any thread. False: run() has returned, and it is not
  // run; what was posted shortly before may be dropped too.
  bool post(std::function<void()> task);
  // What a task returns that is posted so. Holds std::future_error if it is not run.
  template <class Task>
  auto ask(Task task) {
    // Held by what is posted, which may run after nobody waits any more.
    using Answer = std::invoke_result_t<Task, AggregatorServer&>;
    auto const asked = std::make_shared<std::packaged_task<Answer()>>(
        [this, task = std::move(task)]() mutable { return task(*this); });
    auto result = asked->get_future();
    post([asked] { (*asked)(); });
    return result;
  }
  // Calls it whenever the file is readable, which it is to change. The file outlives the server.
  void watch(FileDescriptor const& file, std::function<void()> readable);

  // Takes no more jobs, and has run() return when none is left, or `limit` has passed, or that of
  // a former call.
  void drain(Duration limit);
  // Drops the connections of a job, which goes on without this aggregator. False: there is none.
  bool end_job(JobId const& job);
  AggregatorReport report() const;

 private:
  struct Connection final : MessageSink {
    Connection(AggregatorServer& its_server, int its_number, FileDescriptor accepted,
               TimePoint now);

    Place place(std::uint32_t instance, std::size_t bytes,
                std::span<const std::byte> begin) override;
    void take(std::uint32_t instance, std::span<const std::byte> message) override;

    AggregatorServer& server;
    int const number;
    FileDescriptor socket;
    std::string peer;
    TimePoint since;
    std::vector<std::byte> greeting;     // as long as it is known to be; then the proof
    std::size_t greeted = 0;             // bytes of it that are there
    std::optional<Challenge> challenge;  // that was sent
    bool stranger = true;                // has not greeted yet
    bool joined = false;
    MessagePath path;
    std::uint64_t placed = 0;  // a bit for each instance: a message is on its way to its place
    bool readable = false;
    std::string end;                          // why it is to be closed; empty: it is not
    CloseCause cause = CloseCause::greeting;  // of an end now
  };

  void send(int connection, std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> memory) override;
  void send_copy(int connection, std::uint32_t instance,
                 std::span<const std::byte> message) override;
  void drop(int connection, InaHost::DropCause cause, std::string const& why) override;
  void begun(InaJobReport const& job) override;
  void ended(InaJobReport const& job) override;
  void refused(JobId const& job, RefusalReason reason, std::string_view text) override;

  void accept_all();
  void serve(Connection& connection);
  void greet(Connection& connection);
  std::vector<std::byte> answer(Connection& connection);
  std::vector<std::byte> welcome(Connection& connection, ParsedGreeting const& greeting,
                                 std::string_view owner);
  UcxOffer take_offer(Connection& connection, UcxOffer const& offer);
  void open_ucx();
  void progress();
  void close_ended();
  void close_silent(TimePoint now);
  void watch_listener(bool on);
  void refuse_for_a_while(std::string const& why);
  void serve_all();
  void take_posted();
  bool over();
  void log(LogLevel level, std::string text, decltype(LogEntry::fields) fields = {}) const;

  AggregatorOptions const options_;
  Log const log_;
  InaHost host_;                      // outlives the bytes that connections still hold
  std::unique_ptr<UcxMessages> ucx_;  // null: over TCP only
  FileDescriptor listener_, events_, posted_event_;
  std::mutex posted_mutex_;
  std::vector<std::function<void()>> posted_;
  bool ended_ = false;  // run() has returned
  std::atomic<bool> stop_ = false;
  std::vector<std::function<void()>> watched_;
  std::optional<TimePoint> drained_by_;  // it is draining
  std::string address_;
  bool accepting_ = false;
  std::vector<std::unique_ptr<Connection>> connections_;  // [number]
  std::size_t open_ = 0;
  std::size_t strangers_ = 0;  // have not greeted yet
  std::uint64_t begun_jobs_ = 0;
  std::array<std::uint64_t, std::size(close_cause_table)> closed_{};  // [CloseCause]
  TimePoint now_;
  TimePoint accept_again_{};  // no connections are accepted before
};

}  // namespace sparsecomm
