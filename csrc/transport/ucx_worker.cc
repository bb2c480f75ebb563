#include "transport/ucx_worker.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

namespace sparsecomm {
namespace {

// Settings in place of UCX's own, of which the release gets the first value that it takes.
// MM_ERROR_HANDLING: endpoints through shared memory that are to report failures fail without (1.13
// leaves shared memory out altogether). RNDV_THRESH: UCX goes over to a handshake from 8 KiB on,
// which costs a TCP message of 16 KiB five times as long. It pays where it saves a copy, within a
// host and over RDMA; over TCP alone it leaves the link idle for a round trip in each message.
struct Default {
  char const* name;
  std::vector<std::string> values;
};

std::vector<Default> default_settings() {
  std::error_code error;
  bool const rdma = std::filesystem::directory_iterator("/sys/class/infiniband", error) !=
                    std::filesystem::directory_iterator();
  Default threshold{"RNDV_THRESH", {"64k"}};
  if (!rdma) threshold.values.insert(threshold.values.begin(), "intra:64k,inter:inf");
  return {{"MM_ERROR_HANDLING", {"y"}}, threshold};
}

constexpr unsigned api_major = 1, api_minor = 13;

void check(UcxLibrary const& ucx, ucs_status_t status, char const* function) {
  require<Error>(status == UCS_OK, function, " failed: ", ucx.ucs_status_string(status));
}

void apply(UcxLibrary const& ucx, UcxOptions const& options, ucp_config_t* config) {
  std::vector<std::string_view> made(options.reserved.begin(), options.reserved.end());
  auto const is_made = [&](std::string_view name) {
    return std::ranges::find(made, name) != made.end();
  };
  auto const apply_first = [&](std::string const& name, std::span<const std::string> values) {
    if (is_made(name)) return;
    ucs_status_t status = UCS_OK;
    for (std::string const& value : values) {
      status = ucx.ucp_config_modify(config, name.c_str(), value.c_str());
      if (status == UCS_OK) return;
    }
    throw Error(concat("UCX ", ucx.release, " does not take the setting ", name, '=', values.back(),
                       ": ", ucx.ucs_status_string(status)));
  };
  for (auto const& [name, value] : options.settings) apply_first(name, std::span(&value, 1));
  for (auto const& [name, value] : options.settings) made.push_back(name);
  for (auto const& [name, values] : default_settings()) apply_first(name, values);
}

}  // namespace

UcxWorker::State::~State() {
  guard = ForkGuard();  // before the set's number can become another file's
  if (library.ucp_cleanup == nullptr) return;
  if (!settled) {
    // Once, since every failure of a program that goes on may leave one.
    static std::once_flag said;
    std::call_once(said, [] {
      std::fputs("sparsecomm: a worker of UCX came to no end of its work and is left in memory\n",
                 stderr);
    });
    return;
  }
  UcxQuiet const quiet(library);  // it warns of each request that a broken operation has left
  if (worker != nullptr) library.ucp_worker_destroy(worker);
  if (context != nullptr) library.ucp_cleanup(context);
}

void UcxWorker::Closer::operator()(State* state) const {
  if (state->process == ::getpid()) delete state;  // NOLINT: the deleter of a unique_ptr
}

UcxWorker::UcxWorker(UcxOptions const& options, std::uint64_t features, std::size_t endpoints)
    : state_(new State) {
  State& state = *state_;
  state.process = ::getpid();
  state.library = open_ucx(options);
  UcxLibrary const& ucx = state.library;
  require<Error>(ucx.problem.empty(), ucx.problem);
  SignalHandlersKept const kept;
  ucp_config_t* config = nullptr;
  check(ucx, ucx.ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  std::unique_ptr<ucp_config_t, decltype(ucx.ucp_config_release)> const owned(
      config, ucx.ucp_config_release);
  apply(ucx, options, config);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = features | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = endpoints;
  check(ucx, ucx.ucp_init_version(api_major, api_minor, &params, config, &state.context),
        "ucp_init");
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  UcxQuiet const quiet(ucx);  // it warns of defaults for ways that the user has ruled out
  check(ucx, ucx.ucp_worker_create(state.context, &worker, &state.worker), "ucp_worker_create");
  check(ucx, ucx.ucp_worker_get_efd(state.worker, &state.event), "ucp_worker_get_efd");
  state.guard = ForkGuard(state.event);
}

std::string UcxWorker::address() const {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check(ucx(), ucx().ucp_worker_get_address(get(), &address, &length), "ucp_worker_get_address");
  std::string bytes(reinterpret_cast<char const*>(address), length);
  ucx().ucp_worker_release_address(get(), address);
  return bytes;
}

ucs_status_t UcxWorker::connect(std::string const& address, ucp_err_handler_cb_t failed, void* user,
                                ucp_ep_h& endpoint) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<ucp_address_t const*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = failed, .arg = user};
  ucs_status_t const status = ucx().ucp_ep_create(get(), &params, &endpoint);
  if (status != UCS_OK) endpoint = nullptr;
  return status;
}

bool UcxWorker::sleep(std::initializer_list<int> files, Duration limit) {
  if (ucx().ucp_worker_arm(get()) != UCS_OK) return true;
  std::array<pollfd, 1 + most_files> watched{};
  require(files.size() <= most_files, "a worker sleeps on ", most_files, " files at most, not ",
          files.size());
  std::size_t count = 0;
  watched[count++] = {.fd = state_->event, .events = POLLIN, .revents = 0};
  for (int const file : files) watched[count++] = {.fd = file, .events = POLLIN, .revents = 0};
  auto const milliseconds = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  ::poll(watched.data(), count, static_cast<int>(milliseconds));
  return watched[0].revents != 0;
}

bool UcxWorker::await(void* request, Duration limit) noexcept {
  if (request == nullptr || UCS_PTR_IS_ERR(request)) return request == nullptr;
  Deadline const deadline(steady_clock(), limit);
  auto const done = [&] { return ucx().ucp_request_check_status(request) != UCS_INPROGRESS; };
  while (!done() && !deadline.passed()) progress();
  bool const completed = done();
  ucx().ucp_request_free(request);
  return completed;
}

bool UcxWorker::flush(Duration limit) noexcept {
  ucp_request_param_t param;
  param.op_attr_mask = 0;
  return await(ucx().ucp_worker_flush_nbx(get(), &param), limit);
}

void UcxWorker::close(std::span<ucp_ep_h const> endpoints, Duration limit) noexcept {
  if (state_->process != ::getpid()) return;
  Deadline const deadline(steady_clock(), limit);
  std::vector<void*> requests;
  for (ucp_ep_h const endpoint : endpoints) {
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    requests.push_back(ucx().ucp_ep_close_nbx(endpoint, &param));
  }
  state_->settled = true;
  for (void* const request : requests) state_->settled &= await(request, deadline.remaining());
  // Closing leaves work to the worker, such as giving up connections and the memory of a large
  // message. Destroyed with it, the worker corrupts the heap; a flush waits for it.
  state_->settled &= flush(deadline.remaining());
  while (progress() && !deadline.passed()) {
  }
  state_->settled = state_->settled && !deadline.passed();
}

}  // namespace sparsecomm
