// A UCX context and its worker, closed with their owner. Only files named ucx* include this.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/fork_guard.h"
#include "transport/ucx_library.h"

namespace sparsecomm {

class UcxWorker {
 public:
  // Opens the library and a worker for `features`, UCP_FEATURE_TAG or others (it can sleep in any
  // case), with about as many endpoints. Throws Error with what UCX says.
  UcxWorker(UcxOptions const& options, std::uint64_t features, std::size_t endpoints);
  UcxWorker(UcxWorker&& other) = default;
  UcxWorker& operator=(UcxWorker&&) = delete;
  // In a forked child everything is left as it is: it belongs to the parent.
  ~UcxWorker() = default;

  UcxLibrary const& ucx() const { return state_->library; }
  ucp_worker_h get() const { return state_->worker; }
  std::string address() const;

  // Makes an endpoint to the worker of that address, which connects with the first message.
  // `failed` is called with `user`, within progress(), when the connection breaks. `endpoint` is
  // null unless this returns UCS_OK.
  ucs_status_t connect(std::string const& address, ucp_err_handler_cb_t failed, void* user,
                       ucp_ep_h& endpoint);
  // Returns whether anything happened.
  bool progress() { return ucx().ucp_worker_progress(get()) != 0; }
  static constexpr std::size_t most_files = 4;
  // Sleeps until something may have happened to the worker or one of at most most_files files is
  // readable (negative ones are left out), but no longer than `limit`, rounded up to milliseconds.
  // Returns whether it was the worker.
  bool sleep(std::initializer_list<int> files, Duration limit);
  // Readable when something may have happened, once ucp_worker_arm() has returned UCS_OK.
  int event_file() const { return state_->event; }
  // Has programs that this process executes close the connections that stand now.
  void close_on_exec() const noexcept { state_->guard.close_on_exec(); }

  void cancel(void* request) { ucx().ucp_request_cancel(get(), request); }
  // Pushes out what was sent, for as long as `limit`. False: something is left.
  bool flush(Duration limit) noexcept;
  // Closes the endpoints by force, which peers on other hosts notice. A worker that has not come to
  // an end of it within `limit` is never destroyed: its memory stays taken.
  void close(std::span<ucp_ep_h const> endpoints, Duration limit) noexcept;

 private:
  struct State {
    pid_t process = 0;
    UcxLibrary library;
    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    int event = -1;       // the worker's, which closes it
    ForkGuard guard;      // of the worker's connections
    bool settled = true;  // nothing is left to the worker

    ~State();
  };
  struct Closer {
    void operator()(State* state) const;
  };

  // Releases the request. False: it has not completed.
  bool await(void* request, Duration limit) noexcept;

  std::unique_ptr<State, Closer> state_;
};

}  // namespace sparsecomm
