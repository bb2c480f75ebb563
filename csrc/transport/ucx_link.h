// A UCX context, one worker and an endpoint per peer, closed with their owner. Only files named
// ucx* include this.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/process.h"
#include "transport/ucx_library.h"

namespace sparsecomm {

class UcxLink {
 public:
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    bool failed = false;
    std::string reason;                      // why, once failed
    std::optional<ProcessIdentity> process;  // of a peer on this host
    FileDescriptor ended;                    // readable once that process has ended, where watched
  };

  // Opens the library and a worker, then exchanges addresses and makes the endpoints, which connect
  // with the first message. Collective; throws TransportUnavailable, the same on every rank.
  static UcxLink open(int rank, int size, Rendezvous& rendezvous, UcxOptions const& options);

  UcxLink(UcxLink&& other) = default;
  UcxLink& operator=(UcxLink&&) = delete;
  // In a forked child everything is left as it is: it belongs to the parent.
  ~UcxLink() = default;

  UcxLibrary const& ucx() const { return state_->library; }
  Peer& peer(int rank) { return state_->peers[rank]; }
  // How many of the ranks run on this host, this one included.
  int local_ranks() const;

  // Complete at once: null. Else the engine's request, or an error that UCS_PTR_IS_ERR tells; then
  // the peer is marked as failed. `done` is called, within progress(), for what does not complete
  // at once.
  void* send(int peer, ucp_tag_t tag, std::span<const std::byte> bytes,
             ucp_send_nbx_callback_t done, void* user);
  // As send(), but never null: what is complete at once calls `done` before this returns.
  void* receive(ucp_tag_t tag, std::span<std::byte> bytes, ucp_tag_recv_nbx_callback_t done,
                void* user);
  // Whether anything happened.
  bool progress() { return ucx().ucp_worker_progress(state_->worker) != 0; }
  // Sleeps until something may have happened to the worker, to `peer`'s process or to `wake`, but
  // no longer than `limit` (rounded up to milliseconds).
  void sleep(Peer& peer, int wake, Duration limit);

  void cancel(void* request) { ucx().ucp_request_cancel(state_->worker, request); }
  // Pushes out what was sent, for as long as `limit`. False: something is left.
  bool flush(Duration limit) noexcept;
  // Closes the endpoints, which peers on other hosts notice; sends fail from now on. A worker that
  // has not come to an end of it within `limit` is never destroyed: its memory stays taken.
  void close(Duration limit) noexcept;

 private:
  struct State {
    UcxLibrary library;
    pid_t owner = 0;
    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    int event = -1;  // the worker's, which closes it
    std::vector<Peer> peers;
    bool settled = true;  // nothing is left to the worker
    ~State();
  };
  struct Closer {
    void operator()(State* state) const;
  };

  explicit UcxLink(std::unique_ptr<State, Closer> state) : state_(std::move(state)) {}
  static void make_worker(State& state, UcxOptions const& options, int size);
  static std::string address_of(State const& state);
  static void connect(State& state, int rank, std::span<const std::string> texts);
  // False: it has not completed.
  bool await(void* request, Duration limit) noexcept;

  std::unique_ptr<State, Closer> state_;
};

}  // namespace sparsecomm
