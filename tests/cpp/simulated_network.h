// Ranks connected by a simulated network: messages take time to arrive, a connection that is lost
// or aborted takes with it what is on its way, and reports of failures take time to be heard. All
// times are drawn by the simulation's seed.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "simulation.h"
#include "transport/transport.h"

namespace sparsecomm::test {

struct NetworkState {
  struct Message {
    Tag tag;
    std::vector<std::byte> bytes;
    TimePoint arrives;
  };
  // From one rank to another one, in order.
  struct Link {
    std::deque<Message> messages;
    TimePoint last_arrival{};
    TimePoint lost = TimePoint::max();  // when the receiver notices
    TimePoint broken = TimePoint::max();
  };
  struct Post {
    int rank;
    FailureReport report;
    std::vector<TimePoint> heard;  // [rank]
  };

  NetworkState(SeededSimulation& its_simulation, int its_size)
      : simulation(its_simulation),
        size(its_size),
        links(std::size_t(its_size) * std::size_t(its_size)),
        interrupted(std::size_t(its_size)),
        changes(std::size_t(its_size)),
        stopped_until(std::size_t(its_size)),
        heard_decision(std::size_t(its_size)),
        statuses(std::size_t(its_size)),
        bells(std::size_t(its_size)) {
    for (int rank = 0; rank < size; ++rank) changed.emplace_back(simulation, "a message");
    for (int rank = 0; rank < size; ++rank) rings.emplace_back(simulation, "a report");
  }

  Link& link(int from, int to) { return links[std::size_t(from * size + to)]; }

  // Mostly short, seldom a thousand times as long.
  Duration delay() {
    std::uint64_t const drawn = simulation.draw();
    Duration const unit = std::chrono::nanoseconds(drawn / 64 % 20000);
    return drawn % 64 == 0 ? 1000 * unit : drawn % 4 == 0 ? 50 * unit : unit;
  }

  // Nothing that the rank does goes on while it is stopped. No lock is held.
  void hold(int rank) {
    for (;;) {
      TimePoint const until = stopped_until[std::size_t(rank)];
      if (simulation.now() >= until) return;
      simulation.sleep(until - simulation.now());
    }
  }

  // With the mutex held: something has changed for the rank, or the wait for that.
  void wake(int rank) {
    ++changes[std::size_t(rank)];
    changed[std::size_t(rank)].notify_all();
  }
  void wait(std::unique_lock<std::mutex>& lock, int rank, Duration time) {
    std::uint64_t const& count = changes[std::size_t(rank)];
    changed[std::size_t(rank)].wait_for(lock, time, [&, seen = count] { return count != seen; });
  }

  enum class End : std::uint8_t { breaks, closes };
  // With the mutex held. If it breaks, what arrives later than some moment from now on is lost.
  void break_link(int from, int to, End end = End::breaks) {
    Link& broken = link(from, to);
    TimePoint const now = simulation.now();
    if (broken.broken != TimePoint::max()) return;
    broken.broken = now;
    bool const delivers = end == End::closes || simulation.draw() % 2 == 0;
    TimePoint const last = delivers ? broken.last_arrival : now;
    std::erase_if(broken.messages, [&](Message const& message) { return message.arrives > last; });
    broken.lost = std::max(now, last) + delay();
    wake(to);
  }
  void leave(int rank, End end) {
    std::lock_guard const lock(mutex);
    interrupted[std::size_t(rank)] = true;
    wake(rank);
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) break_link(rank, peer, end);
    }
  }

  SeededSimulation& simulation;
  int const size;
  std::mutex mutex;  // guards what follows
  std::vector<Link> links;
  std::vector<bool> interrupted;
  std::vector<std::uint64_t> changes;  // [rank]
  std::deque<Condition> changed;       // [rank]
  std::vector<TimePoint> stopped_until;
  std::vector<Post> posts;
  std::deque<Condition> rings;  // [rank]
  std::optional<std::string> decided;
  std::vector<TimePoint> heard_decision;
  std::vector<std::string> statuses;
  struct Bell {
    std::vector<std::pair<TimePoint, std::uint32_t>> coming;  // rings, and when they are heard
    HighestRing heard;
    bool woken = false;
  };
  std::vector<Bell> bells;  // [rank]
};

// A store that is heard of late. One thread for each rank raises its alarm.
class NetworkBoard final : public Board {
 public:
  NetworkBoard(int rank, std::shared_ptr<NetworkState> state)
      : rank_(rank), state_(std::move(state)) {}
  ~NetworkBoard() override { end(); }

  bool post_failure(FailureReport const& report) noexcept override {
    state_->hold(rank_);
    std::lock_guard const lock(state_->mutex);
    TimePoint const now = state_->simulation.now();
    auto& posts = state_->posts;
    NetworkState::Post post{.rank = rank_, .report = report, .heard = {}};
    auto const former = std::ranges::find(posts, rank_, &NetworkState::Post::rank);
    post.report.number = former != posts.end() ? former->report.number : posts.size() + 1;
    for (int rank = 0; rank < state_->size; ++rank) {
      TimePoint heard = now + state_->delay();
      // With a report come all that were published before it.
      if (!posts.empty()) heard = std::max(heard, posts.back().heard[std::size_t(rank)]);
      post.heard.push_back(heard);
    }
    posts.push_back(std::move(post));
    for (Condition& ring : state_->rings) ring.notify_all();
    return true;
  }

  std::vector<std::optional<FailureReport>> failures() override {
    state_->hold(rank_);
    std::lock_guard const lock(state_->mutex);
    std::vector<std::optional<FailureReport>> reports(std::size_t(state_->size));
    for (auto const& post : state_->posts) {
      if (post.heard[std::size_t(rank_)] <= state_->simulation.now()) {
        reports[std::size_t(post.rank)] = post.report;
      }
    }
    return reports;
  }
  Duration patience() const override { return std::chrono::seconds(1); }

  void on_failure(std::function<void()> const& alarm) override {
    end();
    if (!alarm) return;
    ended_ = false;
    thread_ = state_->simulation.start("an alarm", [this, alarm] { ring(alarm); });
  }

  std::string decide(std::string const& proposal) override {
    state_->hold(rank_);
    std::lock_guard const lock(state_->mutex);
    if (!state_->decided) {
      state_->decided = proposal;
      for (TimePoint& heard : state_->heard_decision) {
        heard = state_->simulation.now() + state_->delay();
      }
    }
    return *state_->decided;
  }
  std::optional<std::string> decision() override {
    state_->hold(rank_);
    std::lock_guard const lock(state_->mutex);
    bool const heard =
        state_->decided && state_->heard_decision[std::size_t(rank_)] <= state_->simulation.now();
    return heard ? state_->decided : std::nullopt;
  }

  void post_status(std::string_view status) noexcept override {
    std::lock_guard const lock(state_->mutex);
    state_->statuses[std::size_t(rank_)] = status;
  }
  std::vector<std::string> statuses() override {
    std::lock_guard const lock(state_->mutex);
    return state_->statuses;
  }

 private:
  // Until a report is heard of or the alarm is taken away.
  void ring(std::function<void()> const& alarm) {
    std::unique_lock lock(state_->mutex);
    Condition& changed = state_->rings[std::size_t(rank_)];
    auto const posted = [&] { return ended_ || !state_->posts.empty(); };
    changed.wait(lock, posted);
    while (!ended_) {
      Duration const left =
          state_->posts.front().heard[std::size_t(rank_)] - state_->simulation.now();
      if (left <= Duration::zero()) break;
      changed.wait_for(lock, left, [&] { return ended_; });
    }
    if (ended_) return;
    lock.unlock();
    state_->hold(rank_);
    alarm();
  }
  void end() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard const lock(state_->mutex);
      ended_ = true;
    }
    state_->rings[std::size_t(rank_)].notify_all();
    state_->simulation.join(thread_);
  }

  int const rank_;
  std::shared_ptr<NetworkState> const state_;
  bool ended_ = false;
  std::thread thread_;
};

class NetworkTransport final : public Transport {
 public:
  NetworkTransport(int rank, std::shared_ptr<NetworkState> state)
      : Transport(rank, state->size), state_(std::move(state)), board_(rank, state_) {}
  ~NetworkTransport() override { state_->leave(rank(), NetworkState::End::closes); }

  std::string_view name() const override { return "simulated"; }
  bool interruptible() const override { return true; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    state_->hold(rank());
    Slot const slot = slots_.at(request.slot);
    request = {};
    std::size_t bytes = 0;
    if (slot.receives) bytes = receive(slot, deadline);
    state_->hold(rank());
    return bytes;
  }

  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    state_->hold(rank());
    std::unique_lock lock(state_->mutex);
    auto& bell = state_->bells[std::size_t(rank())];
    for (;;) {
      if (state_->interrupted[std::size_t(rank())]) {
        throw Interrupted(aborted_here, {});
      }
      TimePoint const now = state_->simulation.now();
      Duration left = deadline.remaining();
      std::erase_if(bell.coming, [&](auto const& ring) {
        if (ring.first <= now) bell.heard.add(ring.second);
        left = std::min(left, std::max(ring.first - now, Duration(1)));
        return ring.first <= now;
      });
      bool const woken = std::exchange(bell.woken, false);
      if (bell.heard.above(heard)) return Woken::rung;
      if (woken) return Woken::woken;
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank()) continue;
        TimePoint const gone = state_->link(peer, rank()).lost;
        if (gone <= now) throw lost(peer);
        if (gone != TimePoint::max()) left = std::min(left, gone - now);
      }
      if (deadline.passed()) return Woken::late;
      if (deadline.interruptible()) left = std::min(left, Interrupt::period);
      state_->wait(lock, rank(), left);
      lock.unlock();
      deadline.poll_interrupt(state_->simulation.now());
      state_->hold(rank());
      lock.lock();
    }
  }
  void wake() noexcept override {
    std::lock_guard const lock(state_->mutex);
    state_->bells[std::size_t(rank())].woken = true;
    state_->wake(rank());
  }

  void interrupt() noexcept override {
    std::lock_guard const lock(state_->mutex);
    state_->interrupted[std::size_t(rank())] = true;
    state_->wake(rank());
  }
  void abort() noexcept override { state_->leave(rank(), NetworkState::End::breaks); }
  Board& board() override { return board_; }

  void cut(int peer) {
    std::lock_guard const lock(state_->mutex);
    state_->break_link(rank(), peer);
    state_->break_link(peer, rank());
  }
  // Cuts the connections between two parts of the ranks, which the seed draws.
  void split() {
    std::vector<std::uint64_t> parts;
    for (int rank = 0; rank < size(); ++rank) parts.push_back(state_->simulation.draw() % 2);
    std::lock_guard const lock(state_->mutex);
    for (int from = 0; from < size(); ++from) {
      for (int to = 0; to < size(); ++to) {
        if (parts[std::size_t(from)] != parts[std::size_t(to)]) state_->break_link(from, to);
      }
    }
  }
  void stop(Duration time) {
    std::unique_lock lock(state_->mutex);
    state_->stopped_until[std::size_t(rank())] = state_->simulation.now() + time;
    lock.unlock();
    state_->hold(rank());
  }

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    state_->simulation.yield();
    state_->hold(rank());
    std::lock_guard const lock(state_->mutex);
    throw_if_interrupted(peer);
    if (state_->link(rank(), peer).broken != TimePoint::max()) return;
    state_->bells[std::size_t(peer)].coming.emplace_back(state_->simulation.now() + state_->delay(),
                                                         number);
    state_->wake(peer);
  }
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    state_->simulation.yield();
    state_->hold(rank());
    std::lock_guard const lock(state_->mutex);
    throw_if_interrupted(peer);
    TimePoint const now = state_->simulation.now();
    if (state_->link(peer, rank()).lost <= now) throw lost(peer);
    auto& link = state_->link(rank(), peer);
    if (link.broken == TimePoint::max()) {
      link.last_arrival = std::max(link.last_arrival, now + state_->delay());
      link.messages.push_back({tag, {bytes.begin(), bytes.end()}, link.last_arrival});
      state_->wake(peer);
    }
    return keep({});
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return keep({true, peer, tag, bytes});
  }

 private:
  struct Slot {
    bool receives = false;
    int peer = 0;
    Tag tag = 0;
    std::span<std::byte> bytes{};
  };

  Request keep(Slot const& slot) {
    slots_.push_back(slot);
    return {static_cast<std::uint32_t>(slots_.size() - 1)};
  }
  void throw_if_interrupted(int peer) const {
    if (!state_->interrupted[std::size_t(rank())]) return;
    throw Interrupted(aborted_here, {peer});
  }
  static PeerLost lost(int peer) { return {concat("rank ", peer, " is gone"), {peer}}; }

  std::size_t receive(Slot const& slot, Deadline const& deadline) {
    std::unique_lock lock(state_->mutex);
    auto& link = state_->link(slot.peer, rank());
    for (;;) {
      throw_if_interrupted(slot.peer);
      TimePoint const now = state_->simulation.now();
      auto const message = std::ranges::find(link.messages, slot.tag, &NetworkState::Message::tag);
      bool const there = message != link.messages.end();
      if (there && message->arrives <= now) {
        std::size_t const size = std::min(message->bytes.size(), slot.bytes.size());
        std::copy_n(message->bytes.begin(), size, slot.bytes.begin());
        link.messages.erase(message);
        return size;
      }
      if (!there && link.lost <= now) throw lost(slot.peer);
      if (deadline.passed()) {
        throw Timeout(
            concat("rank ", slot.peer, " sent nothing within ", deadline.allowance_seconds(), " s"),
            {slot.peer});
      }
      Duration left = deadline.remaining();
      if (there) left = std::min(left, message->arrives - now);
      if (link.lost > now && link.lost != TimePoint::max()) left = std::min(left, link.lost - now);
      if (deadline.interruptible()) left = std::min(left, Interrupt::period);
      state_->wait(lock, rank(), left);
      if (!deadline.interruptible()) continue;
      lock.unlock();
      deadline.poll_interrupt(state_->simulation.now());
      lock.lock();
    }
  }

  std::shared_ptr<NetworkState> const state_;
  NetworkBoard board_;
  std::deque<Slot> slots_;
};

// The connected transports of `size` ranks, NetworkTransports.
inline std::vector<std::unique_ptr<NetworkTransport>> make_network_transports(
    SeededSimulation& simulation, int size) {
  auto const state = std::make_shared<NetworkState>(simulation, size);
  std::vector<std::unique_ptr<NetworkTransport>> made;
  for (int rank = 0; rank < size; ++rank) {
    made.push_back(std::make_unique<NetworkTransport>(rank, state));
  }
  return made;
}

}  // namespace sparsecomm::test
