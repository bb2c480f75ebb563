// The operations that an aggregator runs, of any number of jobs, as a state machine: messages and
// the time go in, messages to send come out. It has no sockets, threads or clock.
//
// 1. A connection joins a job as one of its workers. A job lasts as long as it has connections.
// 2. The first message of an operation starts it in the instance that it names, in memory that is
//    admitted before and kept for the operations that follow there.
// 3. Messages are received to the place that the host names after the first bytes of each, so that
//    nothing that arrives makes it allocate what was not admitted.
// 4. What ends an operation for all workers, a refusal, goes to those that have begun it, and to
//    the others as soon as they do.
//
// Source: Gu et al. 2024 (OmNICCL), section 2.2; one aggregator there runs one job.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "ina/admission.h"
#include "ina/counts.h"
#include "ina/link.h"
#include "ina/message.h"
#include "ina/policy.h"

namespace sparsecomm {

// Drawn at random for each group of workers.
using JobId = std::array<std::uint64_t, 2>;

// In 32 hexadecimal digits, as its members log it.
std::string name(JobId const& job);

struct JobMember {
  JobId job{};
  std::uint16_t workers = 1;
  std::uint16_t worker = 0;  // less than workers
};

struct InaLimits {
  std::size_t memory = std::size_t{1} << 28;  // bytes, of the operations of all jobs
  std::size_t job_memory = memory;            // of one job
  Duration round = std::chrono::seconds(60);  // after which a refusal names who is missing
  Duration idle = longest_duration;           // after which a job without operations is ended
  std::size_t workers = 1024;                 // of a job
};

// A job as it is now.
struct InaJobReport {
  JobId id{};
  std::string owner;
  std::size_t workers = 0, connected = 0;
  TimePoint begun, active;  // the latest: of a message
  std::size_t memory = 0;   // bytes, admitted
  InaCounts counts;
};

class InaHost {
 public:
  enum class DropCause : std::uint8_t { replaced, idle, ended };

  // What the host says to connections, which its owner numbers from 0. It is not to call the host
  // back: a connection that breaks leaves later.
  class Outlet {
   public:
    // The bytes stay as InaAggregator::receive() says, and as long as `memory` is held, which is
    // to be let go once they are on their way.
    virtual void send(int connection, std::uint32_t instance, InaMessage const& message,
                      std::shared_ptr<void const> memory) = 0;
    // The bytes do not stay.
    virtual void send_copy(int connection, std::uint32_t instance,
                           std::span<const std::byte> message) = 0;
    // It has left: another connection has taken its place, or its job was ended.
    virtual void drop(int connection, DropCause cause, std::string const& why) = 0;

    // What there is to log.
    virtual void begun(InaJobReport const& /*job*/) {}
    virtual void ended(InaJobReport const& /*job*/) {}
    virtual void refused(JobId const& /*job*/, RefusalReason /*reason*/,
                         std::string_view /*text*/) {}

   protected:
    ~Outlet() = default;
  };

  // Beside the memory that is admitted, the host keeps up to 1 MiB of refusals of a job, and 600
  // bytes for each of its workers.
  InaHost(InaLimits const& limits, Outlet& outlet, InaPolicy const& policy = vote_policy)
      : limits_(limits), admission_(limits.memory), outlet_(outlet), policy_(policy) {}

  // Step 1. A worker that is connected already is taken to be gone. `owner`: the name of whoever's
  // token it has; empty where none are asked for. Throws InvalidArgument if the member is not one
  // of a job of so many workers, the job has more than there may be, or another owner, or an
  // operator has ended it.
  void join(int connection, JobMember const& member, TimePoint now, std::string_view owner = {});
  // `why` is told the other workers. Does nothing if the connection is in no job.
  void leave(int connection, std::string const& why);

  // Steps 2 and 3: the place for a message of `bytes` that begins with `begin`: at least its first
  // opening_bytes, or all of it.
  using Place = MessageSink::Place;  // empty if the message has been answered, too
  // Throws MalformedFrame if nothing that this connection still sends can be of use: end it.
  Place place(int connection, std::uint32_t instance, std::size_t bytes,
              std::span<const std::byte> begin, TimePoint now);
  // Takes the message that was placed last for this instance of the connection.
  void receive(int connection, std::uint32_t instance, std::span<const std::byte> message,
               TimePoint now);

  // Ends the operations whose deadline has passed, and the jobs that are idle for too long. Returns
  // whether any operations are under way.
  bool expire(TimePoint now);
  // Drops a job's connections. False: there is no such job.
  bool end(JobId const& job, DropCause cause, std::string const& why);

  std::size_t jobs() const { return jobs_.size(); }
  bool has(JobId const& job) const { return jobs_.contains(job); }
  // By their identities.
  std::vector<InaJobReport> reports() const;
  // Of all jobs that there have been.
  InaCounts const& counts() const { return counts_; }
  Admission const& admission() const { return admission_; }

 private:
  struct Memory {
    // The grants come before what they grant.
    Memory(std::shared_ptr<Admission> admission, Admission& of_all, InaPolicy const& policy,
           InaPlan const& plan)
        : job_admission(std::move(admission)),
          job_grant(job_admission->admit(plan)),
          grant(of_all.admit(plan)),
          aggregator(policy.make_aggregator(plan)) {}
    std::shared_ptr<Admission> job_admission;  // the job may end first
    Admission::Grant job_grant, grant;
    std::unique_ptr<InaAggregator> aggregator;
  };
  struct Operation {
    std::uint32_t number = 0;
    std::vector<bool> opened;        // [worker]: has begun it
    std::vector<std::byte> refusal;  // if it has failed

    bool opened_by_all() const { return std::ranges::find(opened, false) == opened.end(); }
  };
  struct Instance {
    std::optional<Operation> current;
    std::vector<std::optional<std::uint32_t>> begun;  // [worker]: the operation that it began last
    InaPlan plan;
    std::shared_ptr<Memory> memory;  // null until it is admitted
    TimePoint round_begun;

    bool running() const { return current && memory && memory->aggregator->running(); }
  };
  struct Job {
    std::string owner;
    std::vector<int> connections;   // [worker], negative: none
    std::vector<std::string> lost;  // [worker]: why, if it was connected and is not
    std::map<std::uint32_t, Instance> instances;
    // Refused before, and some workers have not begun them, with their instances.
    std::vector<std::pair<std::uint32_t, Operation>> refused;
    std::shared_ptr<Admission> admission;
    TimePoint begun, active;
    InaCounts counts;
  };
  struct Member {
    JobId id{};
    Job* job = nullptr;
    std::size_t worker = 0;
  };

  // A worker that is refused may be this many operations ahead of one that has not begun them, all
  // instances of a job together.
  static constexpr std::size_t most_refused = 128;
  static constexpr std::size_t most_ended = 1024;

  Member& member_of(int connection);
  bool refuse_former(int connection, std::uint32_t number, InaHeader const& header);
  Place open(int connection, std::uint32_t number, InaHeader const& header, InaPlan const& plan,
             std::size_t bytes, TimePoint now);
  void start(Member const& member, std::uint32_t number, InaHeader const& header,
             InaPlan const& plan, TimePoint now);
  void answer(JobId const& id, Job& job, std::uint32_t number,
              std::optional<InaMessage> const& message);
  void count_round(Job& job, Instance& instance, TimePoint now);
  void send_refusal(Job& job, int connection, std::uint32_t number, Operation const& operation);
  InaJobReport report(JobId const& id, Job const& job) const;
  // Counts it for the job and for all.
  void count(Job& job, auto const& change) {
    change(job.counts);
    change(counts_);
  }

  InaLimits limits_;
  Admission admission_;  // outlives the grants
  Outlet& outlet_;
  InaPolicy const& policy_;
  std::map<JobId, Job> jobs_;
  std::deque<JobId> ended_;  // by operators: the latest
  InaCounts counts_;
  std::vector<Member> members_;  // [connection]; without a job: none
};

}  // namespace sparsecomm
