#include "transport/ucx.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "transport/ping_pong.h"
#include "transport/ucx_link.h"

namespace sparsecomm {
namespace {

// Tags of our own; a user's are below 2^31.
constexpr std::uint32_t hello_tag = 0xffffffffu, goodbye_tag = 0xfffffffeu;
constexpr unsigned polls_per_look = 32;  // at clock and flags, which cost more than a poll
constexpr Duration longest_sleep = std::chrono::milliseconds(100);  // in case no event comes
// For what is still to be said to peers that may not be listening.
constexpr Duration brief_farewell = std::chrono::milliseconds(100);
// For what is still to be said otherwise, and for closing in any case.
constexpr Duration farewell = std::chrono::seconds(1);
// Before each further poll gives the core away for a moment: ranks that share one answer no sooner.
constexpr Duration solitary_spin = std::chrono::microseconds(2);
// Where ranks outnumber the cores, what one polls away the others lack.
constexpr Duration crowded_spin = std::chrono::microseconds(10);
constexpr char const* aborted_here = "this rank's transport was aborted";

// UCX matches the whole of it: who sent the message, and which one it is.
ucp_tag_t tag_of(int sender, Tag tag) {
  return (static_cast<ucp_tag_t>(static_cast<std::uint32_t>(sender)) << 32) | tag;
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(int rank, int size, std::shared_ptr<Rendezvous> rendezvous, UcxLink link,
               Duration spin)
      : Transport(rank, size),
        rendezvous_(std::move(rendezvous)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        owner_(::getpid()),
        link_(std::move(link)),
        crowded_(link_.local_ranks() > static_cast<int>(std::thread::hardware_concurrency())),
        spin_(crowded_ ? std::min(spin, crowded_spin) : spin) {
    require<Error>(wake_.open(), "no file descriptor could be opened for a transport");
  }

  ~UcxTransport() override {
    if (owner_ == ::getpid()) leave(farewell);
  }

  std::string_view name() const override { return "ucx"; }

  // A message between every two ranks, both ways: the connections stand when it returns.
  void greet(Duration timeout) {
    Deadline const deadline(steady_clock(), timeout);
    std::vector<Request> requests;
    std::vector<std::uint32_t> greetings(size());
    auto const own = static_cast<std::uint32_t>(rank());
    greetings_pending_ = true;
    for (int const way : {0, 1}) {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank()) continue;
        requests.push_back(
            way == 0
                ? do_irecv(peer, hello_tag, std::as_writable_bytes(std::span(&greetings[peer], 1)))
                : do_isend(peer, hello_tag, std::as_bytes(std::span(&own, 1))));
      }
    }
    for (Request& request : requests) wait(request, deadline);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      require<Error>(greetings[peer] == static_cast<std::uint32_t>(peer), "rank ", peer,
                     " introduced itself as rank ", greetings[peer]);
      take_slot(peer, true).goodbye = true;
      start_receive(last_taken_, goodbye_tag, {});
    }
    greetings_pending_ = false;
  }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    std::uint32_t const index = std::exchange(request, Request{}).slot;
    Slot& slot = slots_.at(index);
    if (!slot.done) {
      try {
        await(slot, deadline);
      } catch (...) {
        slot.abandoned = true;  // the engine still has it
        throw;
      }
    }
    Slot const done = slot;
    release(slot);
    if (done.status == UCS_OK) return done.bytes;
    if (done.status == UCS_ERR_MESSAGE_TRUNCATED) {
      throw PeerInvalid(concat("rank ", done.peer, " sent more than the ", done.capacity,
                               " bytes that were expected"),
                        {done.peer});
    }
    throw lost(done.peer);
  }

  void abort() noexcept override {
    aborted_ = true;
    std::uint64_t const one = 1;
    [[maybe_unused]] auto const written = ::write(wake_.get(), &one, sizeof one);
    if (user_ == std::thread::id() || user_ == std::this_thread::get_id()) leave(brief_farewell);
  }

  void post_failure(FailureReport const& report) noexcept override {
    rendezvous_->post_failure(report);
  }
  std::vector<std::optional<FailureReport>> failures() noexcept override {
    return rendezvous_->failures();
  }
  void post_status(std::string_view status) noexcept override { rendezvous_->post_status(status); }
  std::vector<std::string> statuses() noexcept override { return rendezvous_->statuses(); }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    begin(peer);
    if (link_.peer(peer).failed) throw lost(peer);
    Slot& slot = take_slot(peer, false);
    auto const done = [](void* /*request*/, ucs_status_t status, void* user) {
      static_cast<Slot*>(user)->complete(status, 0);
    };
    void* const request = link_.send(peer, tag_of(rank(), tag), bytes, done, &slot);
    if (UCS_PTR_IS_ERR(request)) {
      release(slot);
      throw lost(peer);
    }
    slot.request = request;
    slot.done = slot.done || request == nullptr;
    return {last_taken_};
  }

  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    begin(peer);  // what a peer had sent before it left can still be received
    take_slot(peer, true).capacity = bytes.size();
    start_receive(last_taken_, tag, bytes);
    return {last_taken_};
  }

 private:
  struct Slot {
    UcxTransport* owner = nullptr;
    int peer = 0;
    std::uint32_t index = 0;
    bool receive = false;
    bool goodbye = false;    // the peer says that it leaves
    bool abandoned = false;  // nobody waits for it any more
    bool done = false;
    ucs_status_t status = UCS_OK;
    std::size_t capacity = 0, bytes = 0;
    void* request = nullptr;  // the engine's, until release()

    // Called by the engine.
    void complete(ucs_status_t result, std::size_t length) {
      done = true;
      status = result;
      bytes = length;
      if (goodbye && result == UCS_OK) owner->left(peer);
      // Where it is not known yet, posting it has not returned, and is what releases it.
      if ((goodbye || abandoned) && request != nullptr) owner->release(*this);
    }
  };

  void begin(int peer) {
    user_ = std::this_thread::get_id();
    if (aborted_) throw PeerLost(aborted_here, {peer});
  }

  Slot& take_slot(int peer, bool receive) {
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    last_taken_ = free_.back();
    free_.pop_back();
    Slot& slot = slots_[last_taken_];
    slot = Slot{};
    slot.owner = this;
    slot.index = last_taken_;
    slot.peer = peer;
    slot.receive = receive;
    return slot;
  }

  void start_receive(std::uint32_t index, Tag tag, std::span<std::byte> bytes) {
    Slot& slot = slots_[index];
    auto const done = [](void* /*request*/, ucs_status_t status, ucp_tag_recv_info_t const* came,
                         void* user) {
      static_cast<Slot*>(user)->complete(status, status == UCS_OK ? came->length : 0);
    };
    void* const request = link_.receive(tag_of(slot.peer, tag), bytes, done, &slot);
    if (UCS_PTR_IS_ERR(request)) {
      slot.done = true;
      slot.status = UCS_PTR_STATUS(request);
    } else {
      slot.request = request;
    }
    if (slot.goodbye && slot.done) release(slot);
  }

  void release(Slot& slot) {
    void* const request = std::exchange(slot.request, nullptr);
    if (request != nullptr) link_.ucx().ucp_request_free(request);
    free_.push_back(slot.index);
  }

  void left(int peer) {
    UcxLink::Peer& gone = link_.peer(peer);
    if (!std::exchange(gone.failed, true)) gone.reason = "it closed its transport";
  }

  PeerLost lost(int peer) {
    return {concat("the connection to rank ", peer, " broke: ", link_.peer(peer).reason), {peer}};
  }

  void await(Slot const& slot, Deadline const& deadline) {
    user_ = std::this_thread::get_id();
    UcxLink::Peer& peer = link_.peer(slot.peer);
    TimePoint idle_since{};
    bool idle = false;
    for (unsigned polls = 1; !slot.done; ++polls) {
      if (aborted_) throw PeerLost(aborted_here, {slot.peer});
      if (link_.progress()) {
        idle = false;
        if (polls % 1024 != 0) continue;
      } else if (peer.failed) {
        throw lost(slot.peer);  // and all that it had sent has been received
      } else if (polls % polls_per_look != 0) {
        continue;
      }
      TimePoint const now = steady_clock().now();
      if (!std::exchange(idle, true)) idle_since = now;
      if (deadline.passed()) {
        throw Timeout(concat("no message ", slot.receive ? "from" : "to", " rank ", slot.peer,
                             " got through within ", deadline.allowance_seconds(), " s"),
                      {slot.peer});
      }
      if (now - idle_since < spin_) {
        // The peer may need this core to answer.
        if (crowded_ || now - idle_since >= solitary_spin) ::sched_yield();
        continue;
      }
      if (greetings_pending_) rendezvous_->check();
      link_.sleep(peer, wake_.get(), std::min<Duration>(deadline.remaining(), longest_sleep));
    }
  }

  // Tells the peers, once what was sent before has gone out, and closes the connections.
  void leave(Duration limit) noexcept {
    if (has_left_.exchange(true)) return;
    for (Slot& slot : slots_) {
      if (slot.request != nullptr && slot.receive && !slot.done) link_.cancel(slot.request);
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || link_.peer(peer).failed) continue;
      auto const ignore = [](void*, ucs_status_t, void*) {};
      void* const request = link_.send(peer, tag_of(rank(), goodbye_tag), {}, ignore, nullptr);
      if (request != nullptr && !UCS_PTR_IS_ERR(request)) link_.ucx().ucp_request_free(request);
    }
    link_.flush(limit);
    link_.close(farewell);
  }

  std::shared_ptr<Rendezvous> rendezvous_;
  FileDescriptor wake_;  // readable once aborted
  pid_t owner_;
  std::atomic<std::thread::id> user_;  // the thread that sent or received last
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> has_left_ = false;
  bool greetings_pending_ = false;
  std::deque<Slot> slots_;  // the engine points to them
  std::vector<std::uint32_t> free_;
  std::uint32_t last_taken_ = 0;
  UcxLink link_;  // after what its callbacks use
  bool crowded_;
  Duration spin_;
};

}  // namespace

std::unique_ptr<Transport> make_ucx_transport(int rank, int size,
                                              std::shared_ptr<Rendezvous> rendezvous,
                                              UcxOptions const& options) {
  Rendezvous& meeting = *rendezvous;
  auto transport = std::make_unique<UcxTransport>(
      rank, size, std::move(rendezvous), UcxLink::open(rank, size, meeting, options), options.spin);
  std::string problem;
  try {
    transport->greet(options.connect_timeout);
  } catch (Aborted const&) {
    throw;
  } catch (Error const& error) {
    problem = error.what();
    transport->abort();
  }
  agree_on_success(meeting, problem);
  return transport;
}

std::vector<double> ucx_ping_pong(int rank, Rendezvous& rendezvous, UcxOptions const& options,
                                  std::size_t bytes, int rounds) {
  int const peer = 1 - rank;
  std::vector<std::byte> outgoing(bytes), incoming(bytes);
  bool done = false;
  UcxLink link = UcxLink::open(rank, 2, rendezvous, options);  // after what its requests point to
  auto const finish = [&](void* request) {
    require<TransportUnavailable>(!UCS_PTR_IS_ERR(request), "a message could not be sent");
    while (request != nullptr && !done) {
      link.progress();
      require<TransportUnavailable>(!link.peer(peer).failed,
                                    "the connection broke: ", link.peer(peer).reason);
    }
    if (request != nullptr) link.ucx().ucp_request_free(request);
  };
  auto const send = [&] {
    done = false;
    auto const sent = [](void*, ucs_status_t, void* user) { *static_cast<bool*>(user) = true; };
    finish(link.send(peer, tag_of(rank, 0), outgoing, sent, &done));
  };
  auto const receive = [&] {
    done = false;
    auto const received = [](void*, ucs_status_t, ucp_tag_recv_info_t const*, void* user) {
      *static_cast<bool*>(user) = true;
    };
    finish(link.receive(tag_of(peer, 0), incoming, received, &done));
  };
  std::vector<double> seconds;
  try {
    seconds = time_ping_pong(rank == 0, rounds, send, receive);
    rendezvous.allgather("");
  } catch (...) {
    link.close(farewell);
    throw;
  }
  link.flush(farewell);
  link.close(farewell);
  return seconds;
}

}  // namespace sparsecomm
