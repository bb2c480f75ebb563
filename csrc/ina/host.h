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
#include "ina/link.h"
#include "ina/message.h"
#include "ina/policy.h"

namespace sparsecomm {

// Drawn at random for each group of workers.
using JobId = std::array<std::uint64_t, 2>;

struct JobMember {
  JobId job{};
  std::uint16_t workers = 1;
  std::uint16_t worker = 0;  // less than workers
};

class InaHost {
 public:
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
    // Another connection has taken this one's place; it has left.
    virtual void drop(int connection, std::string const& why) = 0;

   protected:
    ~Outlet() = default;
  };

  // `limit`: of a round, after which a refusal names the workers that are missing. Jobs have at
  // most `most_workers`; beside `memory` the host keeps up to 1 MiB of refusals of one, and 600
  // bytes for each of its workers.
  InaHost(std::size_t memory, Duration limit, Outlet& outlet, std::size_t most_workers = 1024,
          InaPolicy const& policy = vote_policy)
      : admission_(memory),
        limit_(limit),
        most_workers_(most_workers),
        outlet_(outlet),
        policy_(policy) {}

  // Step 1. A worker that is connected already is taken to be gone. `owner`: the name of whoever's
  // token it has; empty where none are asked for. Throws InvalidArgument if the member is not one
  // of a job of so many workers, the job has more than there may be, or another owner.
  void join(int connection, JobMember const& member, std::string_view owner = {});
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

  // Ends the operations whose deadline has passed. Returns whether any are under way.
  bool expire(TimePoint now);

  std::size_t jobs() const { return jobs_.size(); }
  Admission const& admission() const { return admission_; }

 private:
  struct Memory {
    // The grant comes before what it grants.
    Memory(Admission::Grant granted, InaPolicy const& policy, InaPlan const& plan)
        : grant(std::move(granted)), aggregator(policy.make_aggregator(plan)) {}
    Admission::Grant grant;
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

    bool running() const { return current && memory && memory->aggregator->running(); }
  };
  struct Job {
    std::string owner;
    std::vector<int> connections;   // [worker], negative: none
    std::vector<std::string> lost;  // [worker]: why, if it was connected and is not
    std::map<std::uint32_t, Instance> instances;
    // Refused before, and some workers have not begun them, with their instances.
    std::vector<std::pair<std::uint32_t, Operation>> refused;
  };
  struct Member {
    JobId id{};
    Job* job = nullptr;
    std::size_t worker = 0;
  };

  // A worker that is refused may be this many operations ahead of one that has not begun them, all
  // instances of a job together.
  static constexpr std::size_t most_refused = 128;

  Member& member_of(int connection);
  bool refuse_former(int connection, std::uint32_t number, InaHeader const& header);
  Place open(int connection, std::uint32_t number, InaHeader const& header, InaPlan const& plan,
             std::size_t bytes, TimePoint now);
  void start(Job& job, std::uint32_t number, InaHeader const& header, InaPlan const& plan,
             TimePoint now);
  void answer(Job& job, std::uint32_t number, std::optional<InaMessage> const& message);

  Admission admission_;  // outlives the grants
  Duration limit_;
  std::size_t most_workers_;
  Outlet& outlet_;
  InaPolicy const& policy_;
  std::map<JobId, Job> jobs_;
  std::vector<Member> members_;  // [connection]; without a job: none
};

}  // namespace sparsecomm
