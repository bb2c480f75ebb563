#include "engine/stall.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

#include "engine/mismatch.h"

namespace sparsecomm {
namespace {

// Of the limit: how late a stall is noticed, and how long the others' words are waited for.
constexpr int looks_per_limit = 16;
constexpr Duration shortest_pause = std::chrono::milliseconds(1);

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string rounded(double time) {
  return concat(time < 10 ? std::round(time * 10) / 10 : std::round(time), " s");
}

std::string name_operation(Whereabouts const& at) {
  return concat("operation ", at.operation, at.what.empty() ? "" : concat(" (", at.what, ")"));
}

std::string name_awaited(Whereabouts const& at) {
  if (at.awaited == a_service) return at.service;
  return at.awaited == everybody ? std::string("the others") : concat("rank ", at.awaited);
}

std::string describe(int rank, std::optional<Whereabouts> const& at, std::uint64_t operation) {
  std::string const name = concat("rank ", rank);
  if (!at) {
    std::string const last =
        operation > 1 ? concat(", after it came to operation ", operation - 1) : "";
    return concat("nothing is heard of ", name, last,
                  ": it is stopped, cut off or gone, or was busy until just now");
  }
  std::string const since = concat(" for at least ", rounded(at->seconds));
  if (!at->running) {
    if (at->operation == 0) return concat(name, " has begun no operation", since);
    return concat(name, " is in no operation", since, ", its last was ", name_operation(*at));
  }
  if (at->awaited == anybody) return concat(name, " has submitted nothing", since);
  if (at->awaited == nobody) return concat(name, " computes in ", name_operation(*at), since);
  return concat(name, " waits", since, " for ", name_awaited(*at), " in ", name_operation(*at));
}

// The ranks that keep this one waiting, as far as is known.
std::set<int> find_missing(int rank, Whereabouts const& own,
                           std::span<const std::optional<Whereabouts>> others) {
  std::set<int> missing, awaited;
  if (own.awaited >= 0) awaited.insert(own.awaited);
  // A service may wait for any of them.
  bool const waits_for_all = own.awaited == everybody || own.awaited == a_service;
  for (int peer = 0; peer < static_cast<int>(others.size()); ++peer) {
    if (peer == rank) continue;
    std::optional<Whereabouts> const& at = others[peer];
    if (!at) {
      if (waits_for_all) awaited.insert(peer);
      continue;
    }
    bool const waits = at->running && at->awaited != nobody && at->awaited != anybody;
    bool const behind = at->operation < own.operation;
    if (behind || (at->operation == own.operation && at->running && !waits)) missing.insert(peer);
    if (waits && at->awaited >= 0 && at->awaited != rank) awaited.insert(at->awaited);
  }
  for (int const peer : awaited) {
    if (!others[peer]) missing.insert(peer);
  }
  if (!missing.empty()) return missing;
  // Everybody waits: a message is on its way, or lost, or it is the service that has not come.
  if (own.awaited == a_service) return {};
  if (own.awaited >= 0) return {own.awaited};
  for (int peer = 0; peer < static_cast<int>(others.size()); ++peer) {
    if (peer != rank) missing.insert(peer);
  }
  return missing;
}

}  // namespace

std::string serialize_whereabouts(Whereabouts const& whereabouts) {
  std::ostringstream out;
  out << whereabouts.operation << ' ' << whereabouts.running << ' ' << whereabouts.awaited << ' '
      << whereabouts.seconds << '\n'
      << whereabouts.service << '\n'
      << whereabouts.what;
  return std::move(out).str();
}

std::optional<Whereabouts> parse_whereabouts(std::string_view bytes, int size) {
  std::istringstream in{std::string(bytes)};
  Whereabouts at;
  in >> at.operation >> at.running >> at.awaited >> at.seconds;
  if (!in || at.awaited < anybody || at.awaited >= size || !(at.seconds >= 0)) {
    return std::nullopt;
  }
  in.get();
  std::getline(in, at.service);
  if ((at.awaited == a_service) == at.service.empty()) return std::nullopt;
  at.what.assign(std::istreambuf_iterator<char>(in), {});
  return at;
}

std::string describe_proposal(std::string_view proposal) {
  std::string text(field_of(proposal, "operation"));
  if (auto const group = field_of(proposal, "group"); !group.empty()) {
    text += concat(" of group ", group);
  }
  if (auto const step = field_of(proposal, "step"); !step.empty()) text += concat(", step ", step);
  return text;
}

std::string describe_stall(int rank, Whereabouts const& own,
                           std::span<const std::optional<Whereabouts>> others, Duration timeout) {
  std::set<int> const missing = find_missing(rank, own, others);
  std::string reasons;
  for (int const peer : missing) {
    reasons += concat(reasons.empty() ? "" : "; ", describe(peer, others[peer], own.operation));
  }
  std::string awaited = missing.empty() ? "" : concat(join_ranks(missing), ": ", reasons);
  if (own.awaited == a_service) {
    awaited = concat(own.service, awaited.empty() ? "" : " and for ", awaited);
  }
  return concat("rank ", rank, " has waited for ", rounded(own.seconds), " in ",
                name_operation(own), " for ", awaited,
                timeout < longest_duration
                    ? concat(". The operation fails after ", rounded(seconds(timeout)))
                    : std::string());
}

bool StallWatch::asks(int rank, int size) {
  constexpr int all_ask = 64;
  return size <= all_ask || rank % static_cast<int>(std::sqrt(size)) == 0;
}

StallWatch::StallWatch(Transport& transport, StallOptions options, Duration timeout,
                       Runtime runtime)
    : transport_(transport), options_(std::move(options)), timeout_(timeout), runtime_(runtime) {
  require(options_.limit > Duration::zero(), "a stall limit of ", seconds(options_.limit),
          " s is not positive");
  thread_ = runtime_.start("watch", [this] { watch(); });
}

StallWatch::~StallWatch() {
  stop();
  join();
}

void StallWatch::begin(std::uint64_t operation) {
  std::lock_guard const lock(mutex_);
  operation_ = operation;
  running_ = true;
  proposal_.clear();
  step_.reset();
  name_.clear();
  others_ = 0;
}

void StallWatch::propose(std::string_view text, std::optional<std::uint64_t> step,
                         std::string_view name, std::size_t others) {
  std::lock_guard const lock(mutex_);
  proposal_ = text;
  step_ = step;
  name_ = name;
  others_ = others;
}

// With the lock held.
std::string StallWatch::describe_operation() const {
  std::string what = describe_proposal(step_ ? concat(proposal_, ";step=", *step_) : proposal_);
  if (!name_.empty()) what = concat("'", name_, "'", what.empty() ? "" : ": ", what);
  if (others_ > 0) what += concat(" and ", others_, others_ == 1 ? " other" : " others");
  return what;
}

void StallWatch::end() {
  std::lock_guard const lock(mutex_);
  running_ = false;
}

void StallWatch::stop() {
  {
    std::lock_guard const lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

void StallWatch::join() {
  if (thread_.joinable()) runtime_.join(thread_);
}

StallWatch::Place StallWatch::place() const {
  return {operation_, running_, transport_.awaited(), transport_.waits()};
}

// False once it has been stopped.
bool StallWatch::pause(std::unique_lock<std::mutex>& lock, Duration time) {
  return !changed_.wait_for(lock, time, [&] { return stopped_; });
}

// Not under the lock, which whoever makes progress takes.
void StallWatch::post(std::unique_lock<std::mutex>& lock, std::string_view status) {
  lock.unlock();
  transport_.board().post_status(status);
  lock.lock();
}

void StallWatch::watch() {
  Duration const look = std::max(options_.limit / looks_per_limit, shortest_pause);
  std::unique_lock lock(mutex_);
  Place seen = place();
  TimePoint since = runtime_.clock().now();
  Duration next = options_.limit;
  bool posted = false;
  while (pause(lock, look)) {
    Place const now = place();
    if (now != seen) {
      seen = now;
      since = runtime_.clock().now();
      next = options_.limit;
      // What was said is no longer so.
      if (std::exchange(posted, false)) post(lock, "");
      continue;
    }
    Duration const stalled = runtime_.clock().now() - since;
    if (stalled < next) continue;
    next = 2 * stalled;
    posted = true;
    report(lock, seen, stalled);
  }
}

void StallWatch::report(std::unique_lock<std::mutex>& lock, Place const& seen, Duration stalled) {
  Whereabouts const own{
      seen.operation,       seen.running,
      seen.awaited,         seconds(stalled),
      describe_operation(), seen.awaited == a_service ? transport_.awaited_service() : ""};
  post(lock, serialize_whereabouts(own));
  if (!seen.running || seen.awaited == nobody || seen.awaited == anybody) return;
  if (!asks(transport_.rank(), transport_.size())) return;
  // The others notice at about the same time.
  Duration const patience = std::max(options_.limit / looks_per_limit, shortest_pause);
  if (!pause(lock, patience)) return;
  lock.unlock();
  try {
    transport_.board().statuses();  // asks; what has been answered is read below
  } catch (std::bad_alloc const&) {
    // Asked again below.
  }
  lock.lock();
  if (!pause(lock, patience) || place() != seen) return;
  lock.unlock();
  try {
    std::vector<std::optional<Whereabouts>> others;
    for (std::string const& status : transport_.board().statuses()) {
      others.push_back(parse_whereabouts(status, transport_.size()));
    }
    options_.log(describe_stall(transport_.rank(), own, others, timeout_));
  } catch (std::exception const&) {
    // Whoever logs may fail; the operation is not affected.
  }
  lock.lock();
}

}  // namespace sparsecomm
