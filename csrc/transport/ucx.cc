#include "transport/ucx.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "transport/ucx_doorbell.h"
#include "transport/ucx_link.h"

namespace sparsecomm {
namespace {

constexpr unsigned polls_per_look = 32;  // at clock and flags, which cost more than a poll
// How long messages may fail to come before it is asked whether another peer holds them up.
constexpr Duration holding_up = std::chrono::seconds(2);
constexpr Duration longest_sleep = std::chrono::milliseconds(100);  // in case no event comes
// For what is still to be said to peers that may not be listening.
constexpr Duration brief_farewell = std::chrono::milliseconds(100);
// For what is still to be said otherwise, and for closing in any case.
constexpr Duration farewell = std::chrono::seconds(1);
// Before each further poll gives the core away for a moment: ranks that share one answer no sooner.
constexpr Duration solitary_spin = std::chrono::microseconds(2);
// Where ranks outnumber the cores, what one polls away the others lack.
constexpr Duration crowded_spin = std::chrono::microseconds(10);
// For connecting: what it takes at least, and for each rank more.
constexpr Duration connect_allowance = std::chrono::seconds(10);
constexpr Duration connect_allowance_per_rank = std::chrono::milliseconds(50);
constexpr std::uint64_t longest_introduction = 1 << 20;

// The first message to a peer.
struct Hello {
  std::uint32_t rank = 0, run = 0;
};

std::span<std::byte> bytes_of(auto& object) {
  return std::as_writable_bytes(std::span(&object, 1));
}
std::span<const std::byte> bytes_of(auto const& object) {
  return std::as_bytes(std::span(&object, 1));
}

// Several texts as one: each behind its length.
std::string pack(std::span<const std::string> texts) {
  std::string packed;
  for (std::string const& text : texts) {
    auto const length = static_cast<std::uint32_t>(text.size());
    packed.append(reinterpret_cast<char const*>(&length), sizeof length).append(text);
  }
  return packed;
}

std::vector<std::string> unpack(std::string_view packed) {
  std::vector<std::string> texts;
  while (!packed.empty()) {
    std::uint32_t length = 0;
    require<Error>(packed.size() >= sizeof length, "a list of addresses is cut off");
    std::memcpy(&length, packed.data(), sizeof length);
    packed.remove_prefix(sizeof length);
    require<Error>(packed.size() >= length, "a list of addresses is cut off");
    texts.emplace_back(packed.substr(0, length));
    packed.remove_prefix(length);
  }
  return texts;
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(int rank, int size, std::shared_ptr<Rendezvous> rendezvous, UcxLink link,
               Duration spin)
      : Transport(rank, size, rendezvous->run()),
        rendezvous_(std::move(rendezvous)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        owner_(::getpid()),
        hello_{static_cast<std::uint32_t>(rank), Transport::run()},
        peers_(size),
        doorbell_(rank, size, Transport::run()),
        link_(std::move(link)),
        spin_(spin) {
    require<Error>(wake_.open(), "no file descriptor could be opened for a transport");
  }

  ~UcxTransport() override {
    if (owner_ == ::getpid()) leave(farewell);
  }

  std::string_view name() const override { return "ucx"; }
  bool interruptible() const override { return true; }

  // Messages between this rank and its partners, both ways, over which all learn how to reach all:
  // the connections to the partners stand when it returns.
  void greet(Duration timeout) {
    Deadline const deadline(steady_clock(), timeout);
    std::vector<int> const partners = UcxLink::partners_of(rank(), size());
    greetings_pending_ = true;
    std::vector<Request> requests;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      if (std::ranges::binary_search(partners, peer)) {
        peers_[peer].greeted = true;
        requests.push_back(do_irecv(peer, hello_tag, bytes_of(peers_[peer].hello)));
      } else {
        expect(peer, Notice::hello, hello_tag, bytes_of(peers_[peer].hello));
      }
    }
    for (int const peer : partners) requests.push_back(do_isend(peer, hello_tag, bytes_of(hello_)));
    for (Request& request : requests) wait(request, deadline);
    for (int const peer : partners) {
      Hello const& hello = peers_[peer].hello;
      require<Error>(hello.rank == static_cast<std::uint32_t>(peer) && hello.run == hello_.run,
                     "what introduced itself as rank ", hello.rank, " in place of rank ", peer,
                     " belongs to another run or communicator, ", hello.run, " instead of ",
                     hello_.run);
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) expect(peer, Notice::goodbye, goodbye_tag, {});
    }
    introduce_all(deadline);
    greetings_pending_ = false;
    crowded_ = link_.local_ranks() > static_cast<int>(std::thread::hardware_concurrency());
    if (crowded_) spin_ = std::min(spin_, crowded_spin);
    link_.close_on_exec();
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

  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    if (aborted_) throw Interrupted(aborted_here, {});
    doorbell_.open();
    UcxDoorbell::Idle const idle(doorbell_);
    std::optional<Woken> why;
    bool const in_time = poll_until(nobody, deadline, [&] {
      why = doorbell_.look(heard);
      return why.has_value();
    });
    return in_time ? *why : Woken::late;
  }
  void wake() noexcept override { doorbell_.wake(); }

  void interrupt() noexcept override {
    aborted_ = true;
    std::uint64_t const one = 1;
    [[maybe_unused]] auto const written = ::write(wake_.get(), &one, sizeof one);
  }
  void abort() noexcept override {
    interrupt();
    leave(brief_farewell);
  }

  Board& board() override { return rendezvous_->board(); }

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    begin(peer);
    meet(peer);
    doorbell_.open();
    if (!link_.peer(peer).failed) doorbell_.ring(link_, peer, number);
  }

  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    begin(peer);
    meet(peer);
    if (link_.peer(peer).failed) throw lost(peer);
    Slot& slot = take_slot(peer, false);
    auto const done = [](void* /*request*/, ucs_status_t status, void* user) {
      static_cast<Slot*>(user)->complete(status, 0);
    };
    void* const request = link_.send(peer, UcxLink::tag_of(rank(), tag), bytes, done, &slot);
    if (UCS_PTR_IS_ERR(request)) {
      release(slot);
      throw lost(peer);
    }
    slot.request = request;
    slot.done = slot.done || request == nullptr;
    return {last_taken_};
  }

  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    begin(peer);
    meet(peer);  // what a peer had sent before it left can still be received
    take_slot(peer, true).capacity = bytes.size();
    start_receive(last_taken_, tag, bytes);
    return {last_taken_};
  }

 private:
  // What a peer says unasked: that there is a connection now, or that it leaves.
  enum class Notice : std::uint8_t { none, hello, goodbye };

  struct Slot {
    UcxTransport* owner = nullptr;
    int peer = 0;
    std::uint32_t index = 0;
    bool receive = false;
    Notice notice = Notice::none;  // nobody waits for these
    bool abandoned = false;        // nobody waits for it any more
    bool done = false;
    ucs_status_t status = UCS_OK;
    std::size_t capacity = 0, bytes = 0;
    void* request = nullptr;  // the engine's, until release()

    // Called by the engine.
    void complete(ucs_status_t result, std::size_t length) {
      done = true;
      status = result;
      bytes = length;
      if (result == UCS_OK) owner->noticed(peer, notice);
      // Where it is not known yet, posting it has not returned, and is what releases it.
      if ((notice != Notice::none || abandoned) && request != nullptr) owner->release(*this);
    }
  };

  void begin(int peer) {
    if (aborted_) throw Interrupted(aborted_here, {peer});
  }

  // Before the first message to or from a peer that is no partner: it has to know that this rank
  // depends on it, and this rank hears of its end only over a connection.
  void meet(int peer) {
    if (std::exchange(peers_[peer].greeted, true) || !link_.reach(peer)) return;
    notify(peer, hello_tag, bytes_of(hello_));
    unsealed_ = true;
  }

  // Sends a message that nobody waits for.
  void notify(int peer, Tag tag, std::span<const std::byte> bytes) {
    auto const ignore = [](void*, ucs_status_t, void*) {};
    void* const request = link_.send(peer, UcxLink::tag_of(rank(), tag), bytes, ignore, nullptr);
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) link_.ucx().ucp_request_free(request);
  }

  void expect(int peer, Notice notice, Tag tag, std::span<std::byte> bytes) {
    take_slot(peer, true).notice = notice;
    start_receive(last_taken_, tag, bytes);
  }

  void noticed(int peer, Notice notice) {
    if (notice == Notice::goodbye) left(peer);
    Hello const& hello = peers_[peer].hello;
    peers_[peer].greets |= notice == Notice::hello && hello.run == hello_.run;
  }

  // Bruck allgather of what the ranks say of themselves: ceil(log2 P) rounds among partners.
  void introduce_all(Deadline const& deadline) {
    std::vector<std::string> texts{link_.introduction()};  // of rank, rank + 1, ... (mod size)
    for (int distance = 1; distance < size(); distance *= 2) {
      int const count = std::min(distance, size() - distance);
      int const source = (rank() + distance) % size();
      int const target = (rank() - distance + size()) % size();
      auto& [own, own_size, theirs, size_of_theirs] = introductions_.emplace_back();
      own = pack(std::span(texts).first(count));
      own_size = own.size();
      Request sends[] = {do_isend(target, directory_tag, bytes_of(own_size)),
                         do_isend(target, directory_tag, std::as_bytes(std::span(own)))};
      Request receive = do_irecv(source, directory_tag, bytes_of(size_of_theirs));
      wait(receive, deadline);
      require<Error>(size_of_theirs <= count * longest_introduction, "rank ", source, " announces ",
                     size_of_theirs, " bytes of addresses of ", count, " ranks");
      theirs.resize(size_of_theirs);
      receive = do_irecv(source, directory_tag, std::as_writable_bytes(std::span(theirs)));
      wait(receive, deadline);
      for (Request& send : sends) wait(send, deadline);
      std::vector<std::string> const came = unpack(theirs);
      require<Error>(came.size() == static_cast<std::size_t>(count), "rank ", source, " knows ",
                     came.size(), " ranks' addresses, not ", count);
      texts.insert(texts.end(), came.begin(), came.end());
    }
    for (int step = 1; step < size(); ++step) {
      link_.introduce((rank() + step) % size(), texts[step]);
    }
    introductions_.clear();
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
    void* const request = link_.receive(UcxLink::tag_of(slot.peer, tag), bytes, done, &slot);
    if (UCS_PTR_IS_ERR(request)) {
      slot.done = true;
      slot.status = UCS_PTR_STATUS(request);
    } else {
      slot.request = request;
    }
    if (slot.notice != Notice::none && slot.done) release(slot);
  }

  void release(Slot& slot) {
    void* const request = std::exchange(slot.request, nullptr);
    if (request != nullptr) link_.ucx().ucp_request_free(request);
    free_.push_back(slot.index);
  }

  void left(int peer) {
    UcxLink::Peer& gone = link_.peer(peer);
    gone.said_goodbye = true;
    if (!std::exchange(gone.failed, true)) gone.reason = "it closed its transport";
  }

  PeerLost lost(int peer) {
    return {concat("the connection to rank ", peer, " broke: ", link_.peer(peer).reason), {peer}};
  }

  void await(Slot const& slot, Deadline const& deadline) {
    if (poll_until(slot.peer, deadline, [&] { return slot.done; })) return;
    throw Timeout(concat("no message ", slot.receive ? "from" : "to", " rank ", slot.peer,
                         " got through within ", deadline.allowance_seconds(), " s"),
                  {slot.peer});
  }

  // False when the deadline has passed. `awaited`: the peer that it depends on, or nobody.
  template <class Done>
  bool poll_until(int awaited, Deadline const& deadline, Done&& done) {
    UcxLink::Peer* const peer = awaited == nobody ? nullptr : &link_.peer(awaited);
    TimePoint idle_since{}, roll_call{};
    bool idle = false;
    for (unsigned polls = 1; doorbell_.listen(link_), !done(); ++polls) {
      if (aborted_)
        throw Interrupted(aborted_here, peer ? std::vector{awaited} : std::vector<int>{});
      if (link_.progress()) {
        idle = false;
        if (polls % 1024 != 0) continue;
      } else if (peer && peer->failed) {
        throw lost(awaited);  // and all that it had sent has been received
      } else if (polls % polls_per_look != 0) {
        continue;
      }
      TimePoint const now = steady_clock().now();
      if (!std::exchange(idle, true)) {
        idle_since = now;
        roll_call = now + holding_up;
      }
      deadline.poll_interrupt(now);
      if (deadline.passed()) return false;
      if (now - idle_since < spin_) {
        // The peer may need this core to answer.
        if (crowded_ || now - idle_since >= solitary_spin) ::sched_yield();
        continue;
      }
      if (!peer) require_all_connected();
      if (now >= roll_call) {
        require_all_alive();
        roll_call = now + holding_up;
      }
      if (greetings_pending_) rendezvous_->check();
      if (std::exchange(unsealed_, false)) link_.close_on_exec();
      Duration const limit = std::min<Duration>(deadline.remaining(), longest_sleep);
      if (peer) {
        link_.sleep(*peer, wake_.get(), limit);
      } else {
        link_.sleep(wake_.get(), doorbell_.file(), limit);
        doorbell_.drain();
      }
    }
    return true;
  }

  void require_all_connected() {
    for (int rank = 0; rank < size(); ++rank) {
      if (link_.peer(rank).failed) throw lost(rank);
    }
  }

  // In shared memory the messages of all peers come through one queue: a process that was killed
  // while it put one there holds up all others'.
  void require_all_alive() {
    for (int rank = 0; rank < size(); ++rank) {
      UcxLink::Peer& peer = link_.peer(rank);
      UcxLink::notice_end(peer);
      if (peer.failed && !peer.said_goodbye) throw lost(rank);
    }
  }

  // Tells the peers, once what was sent before has gone out, and closes the connections.
  void leave(Duration limit) noexcept {
    if (has_left_.exchange(true)) return;
    for (Slot& slot : slots_) {
      if (slot.request != nullptr && slot.receive && !slot.done) link_.cancel(slot.request);
    }
    for (int peer = 0; peer < size(); ++peer) {
      bool const known = peers_[peer].greeted || peers_[peer].greets;
      if (peer != rank() && known && link_.reach(peer)) notify(peer, goodbye_tag, {});
    }
    doorbell_.leave(link_);
    link_.flush(limit);
    link_.close(farewell);
  }

  std::shared_ptr<Rendezvous> rendezvous_;
  FileDescriptor wake_;  // readable once aborted
  pid_t owner_;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> has_left_ = false;
  bool greetings_pending_ = false;
  bool unsealed_ = false;  // there may be connections that executed programs would keep
  struct Acquaintance {
    Hello hello;           // as it came
    bool greeted = false;  // it has been sent one, or will be, or is a partner
    bool greets = false;   // it has sent one
  };
  // A round of introduce_all(). Kept if that fails, since the engine points to it until it is left.
  struct Introduction {
    std::string own;
    std::uint64_t own_size = 0;
    std::string theirs;
    std::uint64_t size_of_theirs = 0;
  };
  std::deque<Introduction> introductions_;
  Hello hello_;
  std::vector<Acquaintance> peers_;  // the engine points to them
  std::deque<Slot> slots_;           // the engine points to them
  std::vector<std::uint32_t> free_;
  std::uint32_t last_taken_ = 0;
  UcxDoorbell doorbell_;
  UcxLink link_;         // after what its callbacks use
  bool crowded_ = true;  // until the others are known
  Duration spin_;
};

}  // namespace

std::unique_ptr<Transport> make_ucx_transport(int rank, int size,
                                              std::shared_ptr<Rendezvous> rendezvous,
                                              UcxOptions const& options) {
  Rendezvous& meeting = *rendezvous;
  UcxLink link = UcxLink::open(rank, size, meeting, options);
  std::unique_ptr<UcxTransport> transport;
  std::string problem;
  try {
    transport = std::make_unique<UcxTransport>(rank, size, std::move(rendezvous), std::move(link),
                                               options.spin);
    transport->greet(
        options.connect_timeout.value_or(connect_allowance + size * connect_allowance_per_rank));
  } catch (Aborted const&) {
    throw;
  } catch (Error const& error) {
    problem = error.what();
    if (transport) transport->abort();
  }
  agree_on_success(meeting, problem);
  return transport;
}

}  // namespace sparsecomm
