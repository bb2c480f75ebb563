#include "transport/ucx_link.h"

#include <poll.h>

#include <algorithm>
#include <set>

#include "transport/transport.h"

namespace sparsecomm {
namespace {

// For closing, where nobody says how long it may take.
constexpr Duration link_farewell = std::chrono::seconds(1);
// Files that UCX and what runs beside it open, apart from one for each connection.
constexpr std::size_t spare_files = 64;

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

UcxLink::UcxLink(int rank, int size, UcxOptions const& options)
    : worker_(options, UCP_FEATURE_TAG, static_cast<std::size_t>(size)),
      own_(ProcessIdentity::own()),
      introduction_(Description{ucx().release, own_, worker_.address()}.text()),
      peers_(static_cast<std::size_t>(size)) {
  introduce(rank, introduction_);
}

UcxLink::~UcxLink() {
  if (std::ranges::any_of(peers_, &Peer::endpoint)) close(link_farewell);
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
  std::optional<UcxLink> link;
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
                     link.emplace(UcxLink(rank, size, options));
                   }));
  std::string const differ =
      rendezvous.decide(link->ucx().release, [](std::vector<std::string> const& releases) {
        auto const other = std::ranges::find_if(
            releases, [&](std::string const& release) { return release != releases[0]; });
        if (other == releases.end()) return std::string();
        return concat("rank 0's UCX is ", releases[0], " but rank ", other - releases.begin(),
                      "'s is ", *other, "; name files of one release in SPARSECOMM_UCX_LIBRARY");
      });
  require<TransportUnavailable>(differ.empty(), differ);
  std::vector<int> const partners = partners_of(rank, size);
  std::vector<std::string> const texts = rendezvous.exchange(link->introduction_, partners);
  agree_on_success(rendezvous, problem_of([&] {
                     for (std::size_t i = 0; i < partners.size(); ++i) {
                       link->introduce(partners[i], texts[i]);
                       require<Error>(link->reach(partners[i]), "it finds no way to rank ",
                                      partners[i], ": ", link->peer(partners[i]).reason);
                     }
                   }));
  return std::move(*link);
}

void UcxLink::introduce(int rank, std::string const& text) {
  Description description = parse(text, rank);
  Peer& peer = peers_.at(static_cast<std::size_t>(rank));
  peer.address = std::move(description.address);
  if (description.process.same_host(own_)) peer.process = description.process;
}

bool UcxLink::reach(int rank) {
  Peer& peer = this->peer(rank);
  if (peer.endpoint != nullptr || peer.failed) return !peer.failed;
  if (peer.process) peer.ended = watch_process(*peer.process);
  ucs_status_t const status = worker_.connect(peer.address, failed, &peer, peer.endpoint);
  if (status != UCS_OK && !std::exchange(peer.failed, true)) {
    peer.reason = ucx().ucs_status_string(status);
  }
  return !peer.failed;
}

int UcxLink::local_ranks() const {
  return static_cast<int>(
      std::ranges::count_if(peers_, [](Peer const& peer) { return peer.process.has_value(); }));
}

void* UcxLink::send(int peer, ucp_tag_t tag, std::span<const std::byte> bytes,
                    ucp_send_nbx_callback_t done, void* user) {
  ucp_request_param_t param;
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = done;
  param.user_data = user;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  Peer& to = this->peer(peer);
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
  return ucx().ucp_tag_recv_nbx(worker_.get(), bytes.data(), bytes.size(), tag, UINT64_MAX, &param);
}

void UcxLink::sleep(Peer& peer, int wake, Duration limit) {
  if (!worker_.sleep({wake, peer.ended.get()}, limit)) notice_end(peer);
}

void UcxLink::notice_end(Peer& peer) {
  pollfd file{.fd = peer.ended.get(), .events = POLLIN, .revents = 0};
  bool const ended = ::poll(&file, 1, 0) > 0 || (peer.process && has_ended(*peer.process));
  if (ended && !std::exchange(peer.failed, true)) peer.reason = "its process has ended";
}

void UcxLink::close(Duration limit) noexcept {
  std::vector<ucp_ep_h> endpoints;
  for (Peer& peer : peers_) {
    if (!std::exchange(peer.failed, true)) peer.reason = aborted_here;
    if (peer.endpoint != nullptr) endpoints.push_back(std::exchange(peer.endpoint, nullptr));
  }
  worker_.close(endpoints, limit);
}

}  // namespace sparsecomm
