// Stands in for the other files named ucx* where there were no headers of UCX to compile against.
#include "transport/ucx.h"
#include "transport/ucx_messages.h"

namespace sparsecomm {
namespace {

constexpr char const* absent =
    "sparsecomm was built without UCX; install its headers (pip install libucx-cu13; Debian, "
    "Ubuntu: apt-get install libucx-dev) and build sparsecomm again";

}  // namespace

std::string ucx_problem(UcxOptions const& /*options*/) { return absent; }

std::string ucx_version(UcxOptions const& /*options*/) { throw TransportUnavailable(absent); }

std::unique_ptr<Transport> make_ucx_transport(
    int /*rank*/, int /*size*/,
    std::shared_ptr<Rendezvous> rendezvous,  // NOLINT: as the real one
    UcxOptions const& /*options*/) {
  agree_on_success(*rendezvous, absent);  // other ranks may have been built otherwise
  throw TransportUnavailable(absent);
}

std::unique_ptr<UcxMessages> make_ucx_messages(UcxOptions const& /*options*/,
                                               std::size_t /*connections*/) {
  throw TransportUnavailable(absent);
}

std::vector<double> ucx_ping_pong(int /*rank*/, Rendezvous& rendezvous,
                                  UcxOptions const& /*options*/, std::size_t /*bytes*/,
                                  int /*rounds*/) {
  agree_on_success(rendezvous, absent);
  throw TransportUnavailable(absent);
}

}  // namespace sparsecomm
