#include "transport/mpi/mpi_transport.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "transport/failure_report.h"

namespace sparsecomm {
namespace {

// How a wait passes its time: it tests without pause, then lets others run in between, then sleeps.
constexpr Duration spinning = std::chrono::microseconds(50);
constexpr Duration yielding = std::chrono::microseconds(500);
constexpr Duration shortest_sleep = std::chrono::microseconds(20);
constexpr Duration longest_sleep = std::chrono::milliseconds(1);
// How often a cancelled receive is tested before it is given up.
constexpr int cancel_tests = 1000;
// Of a failure report's text, so that reports fit into eager messages.
constexpr std::size_t max_report_text = 2048;

// Shared by all transports of a process whose MPI wants one caller at a time.
std::mutex& mpi_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::string describe(int error) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(error, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

void check(int error, char const* call) {
  require<Error>(error == MPI_SUCCESS, call,
                 " failed: ", error == MPI_SUCCESS ? "" : describe(error));
}

// Memory that MPI may still read when the transport is gone: a peer that has stopped may never take
// the message.
std::string const* leave_to_mpi(std::string bytes) { return new std::string(std::move(bytes)); }

struct Place {
  MPI_Comm communicator;
  int rank, size;
  std::uint32_t run;
  bool serialized;
};

// One thread calls MPI where waits block, so any level will do.
int thread_level(MpiOptions const& options) {
  if (!options.poll) return MPI_THREAD_MULTIPLE;
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  require(level >= MPI_THREAD_SERIALIZED, "MPI was initialised with ",
          level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED",
          ", but operations run on a thread of their own; initialise it with MPI_THREAD_SERIALIZED "
          "or MPI_THREAD_MULTIPLE (mpi4py: leave mpi4py.rc.thread_level at \"multiple\", its "
          "default, or set it to \"serialized\" before mpi4py.MPI is imported)");
  return level;
}

Place take_place(MPI_Comm parent, MpiOptions const& options) {
  int initialised = 0;
  int finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  require(initialised != 0 && finalised == 0, "MPI is ",
          finalised != 0 ? "finalised already" : "not initialised",
          "; make the transport between MPI_Init_thread and MPI_Finalize");
  int const level = thread_level(options);
  int between_groups = 0;
  check(MPI_Comm_test_inter(parent, &between_groups), "MPI_Comm_test_inter");
  require(between_groups == 0,
          "an intercommunicator has no ranks of one group; merge it first (MPI_Intercomm_merge)");
  Place place{};
  check(MPI_Comm_dup(parent, &place.communicator), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(place.communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(place.communicator, &place.rank), "MPI_Comm_rank");
  check(MPI_Comm_size(place.communicator, &place.size), "MPI_Comm_size");
  if (place.rank == 0) place.run = std::random_device()();
  check(MPI_Bcast(&place.run, 1, MPI_UINT32_T, 0, place.communicator), "MPI_Bcast");
  place.serialized = level < MPI_THREAD_MULTIPLE;
  return place;
}

// Messages of operations have tags below, failure reports have this one.
int report_tag() {
  int* upper_bound = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&upper_bound), &found),
        "MPI_Comm_get_attr");
  require<Error>(found != 0 && *upper_bound >= 32767, "MPI does not say which tags it has");
  return static_cast<int>(std::bit_floor(static_cast<unsigned>(*upper_bound)));
}

// `bytes` bytes as a count of a type. Freed with the object: MPI keeps what is in use.
class Layout {
 public:
  Layout(std::size_t bytes, std::size_t max_count) {
    if (bytes <= max_count) {
      count_ = static_cast<int>(bytes);
      return;
    }
    require(bytes / max_count <= max_count, "a message of ", bytes, " bytes is too long for MPI");
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(max_count), MPI_BYTE, &block),
          "MPI_Type_contiguous");
    std::size_t const blocks = bytes / max_count;
    int const lengths[] = {static_cast<int>(blocks), static_cast<int>(bytes % max_count)};
    MPI_Aint const places[] = {0, static_cast<MPI_Aint>(blocks * max_count)};
    MPI_Datatype const types[] = {block, MPI_BYTE};
    check(MPI_Type_create_struct(2, lengths, places, types, &type_), "MPI_Type_create_struct");
    check(MPI_Type_free(&block), "MPI_Type_free");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    count_ = 1;
  }
  ~Layout() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Layout(Layout const&) = delete;
  Layout& operator=(Layout const&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

// The pauses between the tests of one wait, which grow.
class Pause {
 public:
  // Whether to test again at once.
  bool spins() {
    waited_ = std::chrono::steady_clock::now() - start_;
    return waited_ < spinning;
  }
  void take(Deadline const& deadline) {
    if (waited_ < yielding) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min(sleep_, deadline.remaining()));
      sleep_ = std::min(2 * sleep_, longest_sleep);
    }
  }

 private:
  TimePoint const start_ = std::chrono::steady_clock::now();
  Duration waited_{};
  Duration sleep_ = shortest_sleep;
};

// Is its own board, whose reports are messages: only a rank that waits hears of them.
class MpiTransport final : public Transport, public Board {
 public:
  MpiTransport(Place const& place, MpiOptions const& options)
      : Transport(place.rank, place.size, place.run),
        options_(options),
        serialized_(place.serialized),
        report_tag_(report_tag()),
        communicator_(place.communicator),
        reports_(place.size) {}

  ~MpiTransport() override {
    int finalised = 0;
    MPI_Finalized(&finalised);
    // What has been sent is to be received before a communicator is freed.
    if (finalised == 0 && !aborted_) failures();
    bool const all_sent = finalised == 0 && std::ranges::all_of(*sent_rings_, [&](SentRing& sent) {
                            int done = 0;
                            call([&] { return MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE); });
                            return done != 0;
                          });
    if (!all_sent) std::ignore = sent_rings_.release();  // MPI may still read them
    // Freeing may wait for peers, which after a failure may be gone.
    if (finalised == 0 && !aborted_) call([&] { return MPI_Comm_free(&communicator_); });
  }

  std::string_view name() const override { return "mpi"; }
  bool interruptible() const override { return options_.poll; }

  std::size_t wait(Request& request, Deadline const& deadline) override {
    Slot slot = std::exchange(slots_.at(request.slot), Slot{});
    free_.push_back(std::exchange(request, Request{}).slot);
    MPI_Status status;
    int const error =
        options_.poll ? poll(slot, deadline, status) : MPI_Wait(&slot.request, &status);
    if (error != MPI_SUCCESS) fail(error, slot);
    return slot.receives ? received(slot, status) : 0;
  }

  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    Pause pause;
    for (;;) {
      if (aborted_) throw Interrupted(aborted_here, {});
      if (auto const reporter = first_reporter()) {
        throw Interrupted(concat("rank ", *reporter, " has given up"), {});
      }
      bool const woken = woken_.exchange(false);
      if (is_rung(heard)) return Woken::rung;
      if (woken) return Woken::woken;
      deadline.poll_interrupt(std::chrono::steady_clock::now());
      if (deadline.passed()) return Woken::late;
      if (!pause.spins()) pause.take(deadline);
    }
  }
  void wake() noexcept override { woken_ = true; }

  void interrupt() noexcept override { aborted_ = true; }
  void abort() noexcept override {
    interrupt();
    for (Slot& slot : slots_) withdraw(std::exchange(slot, Slot{}));
    slots_.clear();
    free_.clear();
  }

  Board& board() override { return *this; }

  bool post_failure(FailureReport const& report) noexcept override try {
    FailureReport shortened = report;
    shortened.text.resize(std::min(report.text.size(), max_report_text));
    std::string const* const bytes = leave_to_mpi(serialize_report(shortened));
    std::lock_guard const lock(board_mutex_);
    reports_[rank()] = report;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      int const error = call([&] {
        return MPI_Isend(bytes->data(), static_cast<int>(bytes->size()), MPI_BYTE, peer,
                         report_tag_, communicator_, &request);
      });
      if (error == MPI_SUCCESS) call([&] { return MPI_Request_free(&request); });
    }
    return true;
  } catch (std::bad_alloc const&) {
    return false;
  }

  std::vector<std::optional<FailureReport>> failures() override {
    std::lock_guard const lock(board_mutex_);
    read_reports();
    auto known = reports_;
    // Who saw a connection break may be heard of before the rank at its other end, whose report was
    // first.
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || !known[peer] || known[peer]->cause != FailureReport::Cause::lost) {
        continue;
      }
      auto const missing = [&](int suspect) { return !reports_[suspect]; };
      if (std::ranges::any_of(known[peer]->suspects, missing)) known[peer].reset();
    }
    return known;
  }
  std::vector<std::string> statuses() override {
    return std::vector<std::string>(static_cast<std::size_t>(size()));
  }

 protected:
  void do_ring(int peer, std::uint32_t number) override {
    if (aborted_) throw Interrupted(aborted_here, {peer});
    SentRing& sent = unused_ring();
    RingMessage const ring = make_ring(run(), number);
    std::memcpy(&sent.bytes[1], &ring, sizeof ring);
    call([&] {
      return MPI_Isend(sent.bytes.data(), static_cast<int>(sent.bytes.size()), MPI_BYTE, peer,
                       report_tag_, communicator_, &sent.request);
    });
  }

  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    return post({peer, bytes.size(), false}, [&](Layout const& layout, MPI_Request& request) {
      return MPI_Isend(bytes.data(), layout.count(), layout.type(), peer, tag_of(tag),
                       communicator_, &request);
    });
  }

  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return post({peer, bytes.size(), true}, [&](Layout const& layout, MPI_Request& request) {
      return MPI_Irecv(bytes.data(), layout.count(), layout.type(), peer, tag_of(tag),
                       communicator_, &request);
    });
  }

 private:
  // Begins with a zero, as no report does.
  using RingBytes = std::array<std::byte, 1 + sizeof(RingMessage)>;
  struct SentRing {
    RingBytes bytes{};
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Slot {
    int peer = 0;
    std::size_t bytes = 0;
    bool receives = false;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  template <class F>
  int call(F&& mpi) const {
    if (!serialized_) return mpi();
    std::lock_guard const lock(mpi_mutex());
    return mpi();
  }

  // Only the low bits of the operation's number are lost, and of the operations in flight at a time
  // none are so far apart.
  int tag_of(Tag tag) const { return static_cast<int>(tag & static_cast<Tag>(report_tag_ - 1)); }

  template <class F>
  Request post(Slot slot, F&& start) {
    if (aborted_) throw Interrupted(aborted_here, {slot.peer});
    int const error =
        call([&] { return start(Layout(slot.bytes, options_.max_count), slot.request); });
    if (error != MPI_SUCCESS) fail(error, slot);
    if (free_.empty()) {
      slots_.push_back(slot);
      return {static_cast<std::uint32_t>(slots_.size() - 1)};
    }
    Request const request{free_.back()};
    free_.pop_back();
    slots_[request.slot] = slot;
    return request;
  }

  int poll(Slot& slot, Deadline const& deadline, MPI_Status& status) {
    Pause pause;
    for (;;) {
      int done = 0;
      int const error = call([&] { return MPI_Test(&slot.request, &done, &status); });
      if (error != MPI_SUCCESS || done != 0) return error;
      if (pause.spins()) continue;
      give_up_on_failure(slot, deadline);
      pause.take(deadline);
    }
  }

  SentRing& unused_ring() {
    for (SentRing& sent : *sent_rings_) {
      int done = 0;
      call([&] { return MPI_Test(&sent.request, &done, MPI_STATUS_IGNORE); });
      if (done != 0) return sent;
    }
    return sent_rings_->emplace_back();
  }

  void give_up_on_failure(Slot& slot, Deadline const& deadline) {
    if (aborted_) {
      withdraw(slot);
      throw Interrupted(aborted_here, {slot.peer});
    }
    if (auto const reporter = first_reporter()) {
      withdraw(slot);
      throw Interrupted(concat("rank ", *reporter, " has given up"), {slot.peer});
    }
    try {
      deadline.poll_interrupt(std::chrono::steady_clock::now());
    } catch (...) {
      withdraw(slot);
      throw;
    }
    if (deadline.passed()) {
      withdraw(slot);
      throw Timeout(concat("no message to or from rank ", slot.peer, " got through within ",
                           deadline.allowance_seconds(), " s"),
                    {slot.peer});
    }
  }

  [[noreturn]] void fail(int error, Slot const& slot) const {
    int kind = MPI_SUCCESS;
    MPI_Error_class(error, &kind);
    if (kind == MPI_ERR_TRUNCATE) {
      throw PeerInvalid(concat("rank ", slot.peer, " sent more than the ", slot.bytes,
                               " bytes that were expected"),
                        {slot.peer});
    }
    throw PeerLost(concat("MPI failed towards rank ", slot.peer, ": ", describe(error)),
                   {slot.peer});
  }

  // `status` is not const for older declarations' sake.
  std::size_t received(Slot const& slot, MPI_Status& status) const {
    if (slot.bytes <= options_.max_count) {
      int count = 0;
      MPI_Get_count(&status, MPI_BYTE, &count);
      return static_cast<std::size_t>(count);
    }
    MPI_Count count = 0;
    MPI_Get_elements_x(&status, MPI_BYTE, &count);
    return static_cast<std::size_t>(count);
  }

  // Takes back the memory of a receive. A send keeps it until the peer has taken the message or is
  // known to be gone: MPI has no way to take it back.
  void withdraw(Slot slot) noexcept {
    if (!slot.receives || slot.request == MPI_REQUEST_NULL) return;
    call([&] {
      int done = 0;
      int error = MPI_Cancel(&slot.request);
      for (int test = 0; test < cancel_tests && error == MPI_SUCCESS && done == 0; ++test) {
        error = MPI_Test(&slot.request, &done, MPI_STATUS_IGNORE);
      }
      return error;
    });
  }

  std::optional<int> first_reporter() {
    std::lock_guard const lock(board_mutex_);
    read_reports();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && reports_[peer]) return peer;
    }
    return std::nullopt;
  }

  bool is_rung(std::uint32_t heard) {
    std::lock_guard const lock(board_mutex_);
    if (ring_error_) std::rethrow_exception(ring_error_);
    return rings_.above(heard);
  }

  // The board's mutex is held.
  void hear(std::string const& bytes, int peer) {
    RingMessage ring;
    std::memcpy(&ring, &bytes[1], sizeof ring);
    try {
      if (auto const number = number_of(ring, run(), peer)) rings_.add(*number);
    } catch (PeerInvalid const&) {
      ring_error_ = std::current_exception();
    }
  }

  // The board's mutex is held. Rings come the same way.
  void read_reports() {
    for (;;) {
      int arrived = 0;
      int length = 0;
      MPI_Status status;
      std::string bytes;
      int const error = call([&] {
        int result = MPI_Iprobe(MPI_ANY_SOURCE, report_tag_, communicator_, &arrived, &status);
        if (result != MPI_SUCCESS || arrived == 0) return result;
        MPI_Get_count(&status, MPI_BYTE, &length);
        bytes.resize(static_cast<std::size_t>(std::max(length, 0)));
        return MPI_Recv(bytes.data(), length, MPI_BYTE, status.MPI_SOURCE, report_tag_,
                        communicator_, MPI_STATUS_IGNORE);
      });
      if (error != MPI_SUCCESS || arrived == 0) return;
      if (bytes.size() == sizeof(RingBytes) && bytes[0] == 0) {
        hear(bytes, status.MPI_SOURCE);
      } else {
        reports_[status.MPI_SOURCE] = parse_report(bytes, size());
      }
    }
  }

  MpiOptions options_;
  bool serialized_;
  int report_tag_;
  MPI_Comm communicator_;
  std::atomic<bool> aborted_ = false;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::atomic<bool> woken_ = false;
  std::unique_ptr<std::deque<SentRing>> sent_rings_ = std::make_unique<std::deque<SentRing>>();
  std::mutex board_mutex_;  // guards what follows
  std::vector<std::optional<FailureReport>> reports_;
  HighestRing rings_;
  std::exception_ptr ring_error_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(MPI_Comm parent, MpiOptions const& options) {
  return std::make_unique<MpiTransport>(take_place(parent, options), options);
}

}  // namespace sparsecomm
