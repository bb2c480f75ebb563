#include "transport/ping_pong.h"
#include "transport/ucx.h"
#include "transport/ucx_link.h"

namespace sparsecomm {
namespace {

constexpr Duration farewell = std::chrono::seconds(1);  // for closing

}  // namespace

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
    finish(link.send(peer, UcxLink::tag_of(rank, 0), outgoing, sent, &done));
  };
  auto const receive = [&] {
    done = false;
    auto const received = [](void*, ucs_status_t, ucp_tag_recv_info_t const*, void* user) {
      *static_cast<bool*>(user) = true;
    };
    finish(link.receive(UcxLink::tag_of(peer, 0), incoming, received, &done));
  };
  std::vector<double> seconds;
  try {
    seconds = time_ping_pong(rank == 0, rounds, send, receive);
    agree_on_success(rendezvous, "");  // neither leaves before the other is done
  } catch (...) {
    link.close(farewell);
    throw;
  }
  link.flush(farewell);
  link.close(farewell);
  return seconds;
}

}  // namespace sparsecomm
