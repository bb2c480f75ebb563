// libucp as it was found at run time. Only files named ucx* include this.
#pragma once

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include <memory>
#include <string>

#include "transport/ucx.h"

namespace sparsecomm {

// Every function of libucp and libucs that is used; all are there since 1.13.
#define SPARSECOMM_UCX_FUNCTIONS(X) \
  X(ucp_am_recv_data_nbx)           \
  X(ucp_am_send_nbx)                \
  X(ucp_cleanup)                    \
  X(ucp_config_modify)              \
  X(ucp_config_read)                \
  X(ucp_config_release)             \
  X(ucp_ep_close_nbx)               \
  X(ucp_ep_create)                  \
  X(ucp_get_version)                \
  X(ucp_get_version_string)         \
  X(ucp_init_version)               \
  X(ucp_request_cancel)             \
  X(ucp_request_check_status)       \
  X(ucp_request_free)               \
  X(ucp_tag_recv_nbx)               \
  X(ucp_tag_send_nbx)               \
  X(ucp_worker_arm)                 \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_flush_nbx)           \
  X(ucp_worker_get_address)         \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_progress)            \
  X(ucp_worker_release_address)     \
  X(ucp_worker_set_am_recv_handler) \
  X(ucs_global_opts_get_value)      \
  X(ucs_global_opts_set_value)      \
  X(ucs_status_string)

struct UcxLibrary {
#define SPARSECOMM_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  SPARSECOMM_UCX_FUNCTIONS(SPARSECOMM_UCX_MEMBER)
#undef SPARSECOMM_UCX_MEMBER
  std::string file;     // as it was opened
  std::string release;  // "1.22.0"
  std::string problem;  // why there is none; all else is empty then
};

// Opens the first usable one of those that the options name. It is never closed: UCX does not
// survive that.
UcxLibrary open_ucx(UcxOptions const& options);

// A signal handler of UCX's own would take over the process's: puts back those that were there.
class SignalHandlersKept {
 public:
  SignalHandlersKept();
  ~SignalHandlersKept();
  SignalHandlersKept(SignalHandlersKept const&) = delete;
  SignalHandlersKept& operator=(SignalHandlersKept const&) = delete;

 private:
  struct Handlers;
  std::unique_ptr<Handlers> handlers_;
};

// No warnings of UCX's, only what is `least` or worse, as long as it lives.
class UcxQuiet {
 public:
  explicit UcxQuiet(UcxLibrary const& library, char const* least = "ERROR");
  ~UcxQuiet();
  UcxQuiet(UcxQuiet const&) = delete;
  UcxQuiet& operator=(UcxQuiet const&) = delete;

 private:
  UcxLibrary const& library_;
  std::string level_;  // as it was
};

}  // namespace sparsecomm
