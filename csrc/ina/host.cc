#include "ina/host.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

namespace sparsecomm {
namespace {

// Operations of which one can follow the other in the same memory while updates of the first are
// on their way.
bool same_layout(InaPlan const& a, InaPlan const& b) {
  return a.block_bytes == b.block_bytes && a.workers == b.workers && a.window == b.window &&
         a.type == b.type;
}

}  // namespace

std::string name(JobId const& job) {
  std::string text;
  for (std::uint64_t const half : job) {
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[half >> shift & 15];
  }
  return text;
}

InaHost::Member& InaHost::member_of(int connection) {
  auto const index = static_cast<std::size_t>(connection);
  require(connection >= 0 && index < members_.size() && members_[index].job != nullptr,
          "in-network aggregation: connection ", connection, " is in no job; join() comes first");
  return members_[index];
}

// Step 1.
void InaHost::join(int connection, JobMember const& member, TimePoint now, std::string_view owner) {
  require(member.workers > 0 && member.worker < member.workers, "in-network aggregation: worker ",
          member.worker, " of ", member.workers, " workers, must be less");
  require(member.workers <= limits_.workers, "in-network aggregation: a job of ", member.workers,
          " workers, must be at most ", limits_.workers, ", the connections that there may be");
  require(std::ranges::find(ended_, member.job) == ended_.end(),
          "in-network aggregation: an operator has ended that job here");
  auto const known = jobs_.find(member.job);
  if (known != jobs_.end()) {
    require(known->second.owner == owner,
            "in-network aggregation: others have begun that job with another token");
    std::size_t const workers = known->second.connections.size();
    require(workers == member.workers, "in-network aggregation: worker ", member.worker,
            " says that its job has ", member.workers, " workers, but the others say ", workers);
    int const former = known->second.connections[member.worker];
    if (former >= 0) {
      std::string const why = concat("worker ", member.worker, " has connected once more");
      leave(former, why);
      outlet_.drop(former, DropCause::replaced, why);
    }
  }
  // Perhaps a new one: the last to leave has taken it along.
  auto const [place, is_new] = jobs_.try_emplace(member.job);
  Job& job = place->second;
  job.active = now;
  if (is_new) {
    job.owner = owner;
    job.begun = now;
    job.admission = std::make_shared<Admission>(limits_.job_memory,
                                                "allow the aggregator more memory for a job");
  }
  job.connections.resize(member.workers, -1);
  job.lost.resize(member.workers);
  job.connections[member.worker] = connection;
  job.lost[member.worker].clear();
  auto const index = static_cast<std::size_t>(connection);
  if (members_.size() <= index) members_.resize(index + 1);
  members_[index] = {.id = member.job, .job = &job, .worker = member.worker};
  if (is_new) outlet_.begun(report(member.job, job));
}

void InaHost::leave(int connection, std::string const& why) {
  auto const index = static_cast<std::size_t>(connection);
  if (index >= members_.size() || members_[index].job == nullptr) return;
  Member const member = std::exchange(members_[index], {});
  Job& job = *member.job;
  job.connections[member.worker] = -1;
  job.lost[member.worker] = why.empty() ? "it was closed" : why;
  if (std::ranges::all_of(job.connections, [](int other) { return other < 0; })) {
    outlet_.ended(report(member.id, job));
    jobs_.erase(member.id);
    return;
  }
  int const worker = static_cast<int>(member.worker);
  for (auto& [number, instance] : job.instances) {
    if (instance.running()) {
      answer(member.id, job, number,
             instance.memory->aggregator->lose(worker, job.lost[member.worker]));
    }
    // Who takes its place begins where it likes.
    if (instance.current) instance.current->opened[member.worker] = false;
    instance.begun[member.worker].reset();
  }
  for (auto& [number, operation] : job.refused) operation.opened[member.worker] = false;
}

InaHost::Place InaHost::place(int connection, std::uint32_t instance, std::size_t bytes,
                              std::span<const std::byte> begin, TimePoint now) {
  Member const& member = member_of(connection);
  require<MalformedFrame>(instance < AggregatorLink::most_instances,
                          "aggregation message: instance is ", instance, ", must be less than ",
                          AggregatorLink::most_instances);
  InaHeader const header = parse_ina_header(begin);
  require<MalformedFrame>(header.kind == InaKind::contribution && header.worker == member.worker,
                          "aggregation message: kind is ", int(header.kind), " and worker is ",
                          header.worker, ", must be 1 (contribution) and ", member.worker,
                          ", as whom the connection has joined");
  member.job->active = now;
  Instance& at = member.job->instances[instance];
  at.begun.resize(member.job->connections.size());
  bool const known = at.current && at.current->number == header.operation;
  bool const opened = known && at.current->opened[member.worker];
  Place place;
  if (header.round == 0 && !opened) {
    if (!known && refuse_former(connection, instance, header)) return {};
    place = open(connection, instance, header, peek_plan(begin), bytes, now);
  } else if (!known && at.begun[member.worker] == header.operation) {
    return {};  // refused, and others have gone on, before the refusal had arrived
  } else {
    require<MalformedFrame>(opened, "aggregation message: round ", header.round, " of operation ",
                            header.operation, ", which worker ", member.worker,
                            " has not begun in instance ", instance);
    if (!at.current->refusal.empty()) return {};  // sent before the refusal had arrived
    InaAggregator& aggregator = *at.memory->aggregator;
    int const worker = static_cast<int>(member.worker);
    require<MalformedFrame>(aggregator.running() && !aggregator.arrived(worker),
                            "aggregation message: round ", header.round, " of operation ",
                            header.operation, " of worker ", worker,
                            ", which is not to send before the update of round ",
                            aggregator.round(), aggregator.running() ? "" : ", the last");
    place = {aggregator.receive_spot(worker), at.memory};
  }
  if (place.bytes.empty()) return place;
  require<MalformedFrame>(bytes <= place.bytes.size(), "aggregation message: length is ", bytes,
                          ", must be at most ", place.bytes.size(), " in operation ",
                          header.operation);
  place.bytes = place.bytes.first(bytes);
  return place;
}

// Step 4. False if no such operation was refused.
bool InaHost::refuse_former(int connection, std::uint32_t number, InaHeader const& header) {
  Member const& member = member_of(connection);
  auto& refused = member.job->refused;
  auto const found = std::ranges::find_if(refused, [&](auto const& former) {
    return former.first == number && former.second.number == header.operation;
  });
  if (found == refused.end()) return false;
  Operation& operation = found->second;
  require<MalformedFrame>(!operation.opened[member.worker], "aggregation message: operation ",
                          header.operation, " of worker ", member.worker,
                          ", which has been refused");
  operation.opened[member.worker] = true;
  member.job->instances[number].begun[member.worker] = header.operation;
  send_refusal(*member.job, connection, number, operation);
  if (operation.opened_by_all()) refused.erase(found);
  return true;
}

// The first message of a worker in an operation.
InaHost::Place InaHost::open(int connection, std::uint32_t number, InaHeader const& header,
                             InaPlan const& plan, std::size_t bytes, TimePoint now) {
  Member const& member = member_of(connection);
  Job& job = *member.job;
  Instance& instance = job.instances[number];
  require<MalformedFrame>(plan.workers == job.connections.size(),
                          "aggregation message: plan's workers is ", plan.workers, ", must be the ",
                          job.connections.size(), " of the job");
  if (!instance.current || instance.current->number != header.operation) {
    require<MalformedFrame>(!instance.running(), "aggregation message: operation ",
                            header.operation, " of worker ", member.worker, " while operation ",
                            instance.current ? instance.current->number : 0,
                            " is under way in instance ", number);
    // The difference, so that numbers may begin anew.
    auto const ahead = instance.current ? header.operation - instance.current->number : 1;
    require<MalformedFrame>(ahead < std::uint32_t{1} << 31, "aggregation message: operation ",
                            header.operation, " of worker ", member.worker, " after operation ",
                            header.operation - ahead, " in instance ", number);
    start(member, number, header, plan, now);
  }
  require<MalformedFrame>(instance.running() || !instance.current->refusal.empty(),
                          "aggregation message: operation ", header.operation, " of worker ",
                          member.worker, ", which is over in instance ", number);
  instance.current->opened[member.worker] = true;
  instance.begun[member.worker] = header.operation;
  if (!instance.current->refusal.empty()) {
    send_refusal(job, connection, number, *instance.current);
    return {};
  }
  InaAggregator& aggregator = *instance.memory->aggregator;
  int const worker = static_cast<int>(member.worker);
  auto const spot = aggregator.receive_spot(worker);
  // One that fits is received all the same, since the checksum over all of it tells a plan that was
  // changed on its way from one that differs.
  if (plan != instance.plan && bytes > spot.size()) {
    answer(member.id, job, number, aggregator.receive_plan(worker, plan, now));
    return {};
  }
  return {spot, instance.memory};
}

// Step 2.
void InaHost::start(Member const& member, std::uint32_t number, InaHeader const& header,
                    InaPlan const& plan, TimePoint now) {
  Job& job = *member.job;
  Instance& instance = job.instances[number];
  bool const fits = instance.memory && same_layout(instance.plan, plan);
  if (instance.current && !instance.current->refusal.empty() &&
      !instance.current->opened_by_all()) {
    if (job.refused.size() == most_refused) job.refused.erase(job.refused.begin());
    job.refused.emplace_back(number, std::move(*instance.current));
  }
  if (!instance.current) instance.current.emplace();
  Operation& current = *instance.current;
  current.number = header.operation;
  current.opened.assign(plan.workers, false);
  current.refusal.clear();
  instance.plan = plan;
  if (!fits) {
    instance.memory.reset();
    std::string problem;
    try {
      instance.memory = std::make_shared<Memory>(job.admission, admission_, policy_, plan);
    } catch (NotAdmitted const& error) {
      problem = error.what();
    } catch (std::bad_alloc const&) {
      problem = concat("in-network aggregation: the aggregator's system has no ",
                       instance_bytes(plan), " bytes left; give it less to admit");
    }
    if (!instance.memory) {
      outlet_.refused(member.id, RefusalReason::not_admitted, problem);
      count(job, [](InaCounts& counts) { ++counts.refused(RefusalReason::not_admitted); });
      current.refusal = encode_refusal(
          header.operation,
          {.reason = RefusalReason::not_admitted, .accused = {}, .text = std::move(problem)});
      return;
    }
  }
  InaAggregator& aggregator = *instance.memory->aggregator;
  aggregator.start(plan, header.operation, now, limits_.round);
  instance.round_begun = now;
  for (std::size_t worker = 0; worker < job.lost.size() && aggregator.running(); ++worker) {
    if (job.lost[worker].empty()) continue;
    answer(member.id, job, number, aggregator.lose(static_cast<int>(worker), job.lost[worker]));
  }
}

void InaHost::receive(int connection, std::uint32_t instance, std::span<const std::byte> message,
                      TimePoint now) {
  Member const& member = member_of(connection);
  Job& job = *member.job;
  Instance& at = job.instances[instance];
  // It has failed, and another may have begun, while the message was on its way.
  count(job, [&](InaCounts& counts) { counts.received_bytes += message.size(); });
  if (!at.running() || at.begun[member.worker] != at.current->number) return;
  InaAggregator& aggregator = *at.memory->aggregator;
  auto const update = aggregator.receive(static_cast<int>(member.worker), message, now);
  if (update && !aggregator.failed()) count_round(job, at, now);
  answer(member.id, job, instance, update);
}

// Times are those of the caller's turns: a round that begins and ends within one takes none.
void InaHost::count_round(Job& job, Instance& instance, TimePoint now) {
  Duration const time = now - std::exchange(instance.round_begun, now);
  InaAggregator const& aggregator = *instance.memory->aggregator;
  std::uint64_t const blocks = aggregator.received_blocks();
  std::uint64_t const all = instance.plan.blocks() * instance.plan.workers;
  count(job, [&](InaCounts& counts) {
    counts.add_round(time);
    if (!aggregator.done()) return;
    ++counts.operations;
    counts.blocks += blocks;
    counts.zero_blocks += all - blocks;
  });
}

void InaHost::send_refusal(Job& job, int connection, std::uint32_t number,
                           Operation const& operation) {
  count(job, [&](InaCounts& counts) { counts.sent_bytes += operation.refusal.size(); });
  outlet_.send_copy(connection, number, operation.refusal);
}

// Step 4.
void InaHost::answer(JobId const& id, Job& job, std::uint32_t number,
                     std::optional<InaMessage> const& message) {
  if (!message) return;
  Instance& instance = job.instances[number];
  bool const refused = instance.memory->aggregator->failed();
  if (refused) {
    auto const bytes = message->pieces()[0];
    instance.current->refusal.assign(bytes.begin(), bytes.end());
    RefusalReason const reason = instance.memory->aggregator->failure_reason();
    outlet_.refused(id, reason, instance.memory->aggregator->failure());
    count(job, [reason](InaCounts& counts) { ++counts.refused(reason); });
  }
  for (std::size_t worker = 0; worker < job.connections.size(); ++worker) {
    int const connection = job.connections[worker];
    if (connection < 0 || !instance.current->opened[worker]) continue;
    if (refused) {
      send_refusal(job, connection, number, *instance.current);
    } else {
      count(job, [&](InaCounts& counts) { counts.sent_bytes += message->size(); });
      outlet_.send(connection, number, *message, instance.memory);
    }
  }
}

bool InaHost::expire(TimePoint now) {
  bool busy = false;
  std::vector<JobId> idle;
  for (auto& [id, job] : jobs_) {
    bool running = false;
    for (auto& [number, instance] : job.instances) {
      if (!instance.running()) continue;
      answer(id, job, number, instance.memory->aggregator->expire(now));
      running = running || instance.running();
    }
    if (!running && now - job.active >= limits_.idle) idle.push_back(id);
    busy = busy || running;
  }
  for (JobId const& id : idle) {
    end(id, DropCause::idle,
        concat("the job has sent nothing for ", std::chrono::duration<double>(limits_.idle).count(),
               " s"));
  }
  return busy;
}

bool InaHost::end(JobId const& job, DropCause cause, std::string const& why) {
  auto const found = jobs_.find(job);
  if (found == jobs_.end()) return false;
  InaJobReport const last = report(job, found->second);
  std::vector<int> const connections = std::move(found->second.connections);
  jobs_.erase(found);
  if (cause == DropCause::ended) {
    ended_.push_back(last.id);  // its workers try to come back
    if (ended_.size() > most_ended) ended_.pop_front();
  }
  for (int const connection : connections) {
    if (connection < 0) continue;
    members_[static_cast<std::size_t>(connection)] = {};
    outlet_.drop(connection, cause, why);
  }
  outlet_.ended(last);
  return true;
}

InaJobReport InaHost::report(JobId const& id, Job const& job) const {
  auto const connected = std::ranges::count_if(job.connections, [](int one) { return one >= 0; });
  return {.id = id,
          .owner = job.owner,
          .workers = job.connections.size(),
          .connected = static_cast<std::size_t>(connected),
          .begun = job.begun,
          .active = job.active,
          .memory = job.admission->taken(),
          .counts = job.counts};
}

std::vector<InaJobReport> InaHost::reports() const {
  std::vector<InaJobReport> reports;
  reports.reserve(jobs_.size());
  for (auto const& [id, job] : jobs_) reports.push_back(report(id, job));
  return reports;
}

}  // namespace sparsecomm
