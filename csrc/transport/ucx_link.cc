#include "transport/ucx_link.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <set>

namespace sparsecomm {
namespace {

// What UCX does otherwise: fail endpoints that go through shared memory when asked to report
// failures (1.13 leaves shared memory out altogether), and go over to a handshake from 8 KiB on,
// which costs a TCP message of 16 KiB five times as long.
constexpr std::array<std::pair<char const*, char const*>, 2> defaults{
    {{"MM_ERROR_HANDLING", "y"}, {"RNDV_THRESH", "64k"}}};

// For closing, where nobody says how long it may take.
constexpr Duration farewell = std::chrono::seconds(1);
// Files that UCX and what runs beside it open, apart from one for each connection.
constexpr std::size_t spare_files = 64;

constexpr unsigned api_major = 1, api_minor = 13;

void check(UcxLibrary const& ucx, ucs_status_t status, char const* function) {
  require<Error>(status == UCS_OK, function, " failed: ", ucx.ucs_status_string(status));
}

std::vector<std::pair<std::string, std::string>> settings_of(UcxOptions const& options) {
  std::vector<std::pair<std::string, std::string>> settings = options.settings;
  for (auto const& [name, value] : defaults) {
    bool const given =
        std::ranges::any_of(settings, [&](auto const& setting) { return setting.first == name; });
    if (!given) settings.emplace_back(name, value);
  }
  std::erase_if(settings, [&](auto const& setting) {
    return std::ranges::find(options.reserved, setting.first) != options.reserved.end();
  });
  return settings;
}

// What a rank tells the others of itself: two lines, and the address of its worker.
struct Description {
  std::string release;
  ProcessIdentity process;
  std::string address;

  std::string text() const { return concat(release, '\n', process.text(), '\n', address); }
};

std::string take_line(std::string_view& rest) {
  std::string line(rest.substr(0, rest.find('\n')));
  rest.remove_prefix(std::min(line.size() + 1, rest.size()));
  return line;
}

Description parse(std::string_view text, int rank) {
  Description description;
  description.release = take_line(text);
  auto const process = ProcessIdentity::parse(take_line(text));
  require<Error>(process && !text.empty(), "rank ", rank, " sent no address of UCX");
  description.process = *process;
  description.address = text;
  return description;
}

void failed(void* user, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  auto& peer = *static_cast<UcxLink::Peer*>(user);
  if (!std::exchange(peer.failed, true)) {
    peer.reason = status == UCS_ERR_CONNECTION_RESET ? "it closed the connection"
                                                     : "UCX reports that the connection broke";
  }
}

}  // namespace

UcxLink::State::~State() {
  guard = ForkGuard();  // before the set's number can become another file's
  if (std::ranges::any_of(peers, &Peer::endpoint)) close(farewell);
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

void UcxLink::Closer::operator()(State* state) const {
  if (state->own.pid == static_cast<std::uint64_t>(::getpid()))
    delete state;  // NOLINT: the deleter of a unique_ptr
}

void UcxLink::make_worker(State& state, UcxOptions const& options, int size) {
  UcxLibrary const& ucx = state.library;
  SignalHandlersKept const kept;
  ucp_config_t* config = nullptr;
  check(ucx, ucx.ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  std::unique_ptr<ucp_config_t, decltype(ucx.ucp_config_release)> const owned(
      config, ucx.ucp_config_release);
  for (auto const& [name, value] : settings_of(options)) {
    ucs_status_t const status = ucx.ucp_config_modify(config, name.c_str(), value.c_str());
    require<Error>(status == UCS_OK, "UCX ", ucx.release, " does not take the setting ", name, '=',
                   value, ": ", ucx.ucs_status_string(status));
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = static_cast<std::size_t>(size);
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

std::vector<int> UcxLink::partners_of(int rank, int size) {
  std::set<int> partners;
  for (int distance = 1; distance < size; distance *= 2) {
    partners.insert((rank + distance) % size);
    partners.insert((rank - distance + size) % size);
  }
  return {partners.begin(), partners.end()};
}

UcxLink UcxLink::open(int rank, int size, Rendezvous& rendezvous, UcxOptions const& options) {
  std::unique_ptr<State, Closer> state(new State);
  state->own = ProcessIdentity::own();
  state->peers.resize(size);
  auto const problem_of = [](auto&& attempt) -> std::string {
    try {
      attempt();
      return {};
    } catch (Error const& error) {
      return error.what();
    }
  };
  agree_on_success(rendezvous, problem_of([&] {
                     std::string const problem = descriptor_problem(size - 1 + spare_files);
                     require<Error>(problem.empty(), problem);
                     state->library = open_ucx(options);
                     require<Error>(state->library.problem.empty(), state->library.problem);
                     make_worker(*state, options, size);
                     state->introduction =
                         Description{state->library.release, state->own, address_of(*state)}.text();
                     introduce(*state, rank, state->introduction);
                   }));
  std::string const differ =
      rendezvous.decide(state->library.release, [](std::vector<std::string> const& releases) {
        auto const other = std::ranges::find_if(
            releases, [&](std::string const& release) { return release != releases[0]; });
        if (other == releases.end()) return std::string();
        return concat("rank 0's UCX is ", releases[0], " but rank ", other - releases.begin(),
                      "'s is ", *other, "; name files of one release in SPARSECOMM_UCX_LIBRARY");
      });
  require<TransportUnavailable>(differ.empty(), differ);
  std::vector<int> const partners = partners_of(rank, size);
  std::vector<std::string> const texts = rendezvous.exchange(state->introduction, partners);
  agree_on_success(rendezvous, problem_of([&] {
                     for (std::size_t i = 0; i < partners.size(); ++i) {
                       introduce(*state, partners[i], texts[i]);
                       require<Error>(reach(*state, partners[i]), "it finds no way to rank ",
                                      partners[i], ": ", state->peers[partners[i]].reason);
                     }
                   }));
  return UcxLink(std::move(state));
}

std::string UcxLink::address_of(State const& state) {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check(state.library, state.library.ucp_worker_get_address(state.worker, &address, &length),
        "ucp_worker_get_address");
  std::string bytes(reinterpret_cast<char const*>(address), length);
  state.library.ucp_worker_release_address(state.worker, address);
  return bytes;
}

void UcxLink::introduce(State& state, int rank, std::string const& text) {
  Description description = parse(text, rank);
  Peer& peer = state.peers.at(rank);
  peer.address = std::move(description.address);
  if (description.process.same_host(state.own)) peer.process = description.process;
}

bool UcxLink::reach(State& state, int rank) {
  Peer& peer = state.peers[rank];
  if (peer.endpoint != nullptr || peer.failed) return !peer.failed;
  if (peer.process) peer.ended = watch_process(*peer.process);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<ucp_address_t const*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = failed, .arg = &peer};
  ucs_status_t const status = state.library.ucp_ep_create(state.worker, &params, &peer.endpoint);
  if (status != UCS_OK && !std::exchange(peer.failed, true)) {
    peer.endpoint = nullptr;
    peer.reason = state.library.ucs_status_string(status);
  }
  return !peer.failed;
}

int UcxLink::local_ranks() const {
  return static_cast<int>(std::ranges::count_if(
      state_->peers, [](Peer const& peer) { return peer.process.has_value(); }));
}

void* UcxLink::send(int peer, ucp_tag_t tag, std::span<const std::byte> bytes,
                    ucp_send_nbx_callback_t done, void* user) {
  ucp_request_param_t param;
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = done;
  param.user_data = user;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  Peer& to = state_->peers[peer];
  void* const request =
      ucx().ucp_tag_send_nbx(to.endpoint, bytes.data(), bytes.size(), tag, &param);
  if (UCS_PTR_IS_ERR(request) && !std::exchange(to.failed, true)) {
    to.reason = ucx().ucs_status_string(UCS_PTR_STATUS(request));
  }
  return request;
}

void* UcxLink::receive(ucp_tag_t tag, std::span<std::byte> bytes, ucp_tag_recv_nbx_callback_t done,
                       void* user) {
  ucp_request_param_t param;
  // 1.13 does not say how much came where it completes a receive at once.
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.cb.recv = done;
  param.user_data = user;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return ucx().ucp_tag_recv_nbx(state_->worker, bytes.data(), bytes.size(), tag, UINT64_MAX,
                                &param);
}

void UcxLink::sleep(Peer& peer, int wake, Duration limit) {
  if (ucx().ucp_worker_arm(state_->worker) != UCS_OK) return;  // there is something to progress
  std::array<pollfd, 3> files{{{.fd = state_->event, .events = POLLIN, .revents = 0},
                               {.fd = wake, .events = POLLIN, .revents = 0},
                               {.fd = peer.ended.get(), .events = POLLIN, .revents = 0}}};
  auto const milliseconds = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  int const ready = ::poll(files.data(), files.size(), static_cast<int>(milliseconds));
  if (files[2].revents != 0 || ready == 0) notice_end(peer);
}

void UcxLink::notice_end(Peer& peer) {
  pollfd file{.fd = peer.ended.get(), .events = POLLIN, .revents = 0};
  bool const ended = ::poll(&file, 1, 0) > 0 || (peer.process && has_ended(*peer.process));
  if (ended && !std::exchange(peer.failed, true)) peer.reason = "its process has ended";
}

bool UcxLink::State::await(void* request, Duration limit) const noexcept {
  if (request == nullptr || UCS_PTR_IS_ERR(request)) return request == nullptr;
  Deadline const deadline(steady_clock(), limit);
  auto const done = [&] { return library.ucp_request_check_status(request) != UCS_INPROGRESS; };
  while (!done() && !deadline.passed()) progress();
  bool const completed = done();
  library.ucp_request_free(request);
  return completed;
}

bool UcxLink::State::flush(Duration limit) const noexcept {
  ucp_request_param_t param;
  param.op_attr_mask = 0;
  return await(library.ucp_worker_flush_nbx(worker, &param), limit);
}

void UcxLink::State::close(Duration limit) noexcept {
  Deadline const deadline(steady_clock(), limit);
  std::vector<void*> requests;
  for (Peer& peer : peers) {
    if (!std::exchange(peer.failed, true)) peer.reason = "this rank's transport was aborted";
    if (peer.endpoint == nullptr) continue;
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    requests.push_back(library.ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param));
  }
  settled = true;
  for (void* const request : requests) settled &= await(request, deadline.remaining());
  // Closing leaves work to the worker, such as giving up connections and the memory of a large
  // message. Destroyed with it, the worker corrupts the heap; a flush waits for it.
  settled &= flush(deadline.remaining());
  while (progress() && !deadline.passed()) {
  }
  settled = settled && !deadline.passed();
}

}  // namespace sparsecomm
