#include "connect.h"

#include <array>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d_transport.h"
#include "store_rendezvous.h"

namespace sparsecomm {
namespace {

using RendezvousPtr = std::shared_ptr<Rendezvous>;

std::unique_ptr<Transport> connect_ucx(ConnectPlace const& place, ConnectOptions const& options,
                                       RendezvousPtr const& rendezvous) {
  UcxOptions ucx = options.libraries.ucx;
  ucx.connect_timeout = std::min(ucx.connect_timeout, options.timeout);
  return make_ucx_transport(place.rank, place.size, rendezvous, ucx);
}

std::unique_ptr<Transport> connect_c10d(ConnectPlace const& place,
                                        ConnectOptions const& /*options*/,
                                        RendezvousPtr const& /*rendezvous*/) {
  return make_c10d_transport(place.make_gloo(place.store),
                             c10::make_intrusive<c10d::PrefixStore>("failures", place.store));
}

// How those of transports() that connect processes do so.
struct Connector {
  std::string_view name;
  std::unique_ptr<Transport> (*connect)(ConnectPlace const& place, ConnectOptions const& options,
                                        RendezvousPtr const& rendezvous);
};
constexpr std::array connectors{Connector{"ucx", connect_ucx}, Connector{"c10d", connect_c10d}};

std::vector<TransportEntry const*> candidates(std::string const& name) {
  if (name != "auto") {
    TransportEntry const& entry = find_transport(name);
    require(entry.connects_processes, "transport '", name,
            "' does not connect the ranks of a process group but ", entry.description);
    return {&entry};
  }
  std::vector<TransportEntry const*> entries;
  for (TransportEntry const& entry : transports()) {
    if (entry.automatic) entries.push_back(&entry);
  }
  return entries;
}

void require_the_same(Rendezvous& rendezvous, std::string const& name) {
  std::vector<std::string> const names = rendezvous.allgather(name);
  for (std::size_t rank = 1; rank < names.size(); ++rank) {
    require<TransportUnavailable>(names[rank] == names[0],
                                  "the ranks ask for different transports: ", names[0],
                                  " on rank 0 but ", names[rank], " on rank ", rank);
  }
}

}  // namespace

std::unique_ptr<Transport> connect(ConnectPlace const& place, ConnectOptions const& options,
                                   std::atomic<bool> const& interrupted) {
  auto const entries = candidates(options.transport);
  RendezvousPtr const rendezvous =
      make_store_rendezvous(place.rank, place.size, place.store, options.timeout, interrupted);
  require_the_same(*rendezvous, options.transport);
  for (TransportEntry const* const entry : entries) {
    auto const* const connector = std::ranges::find(connectors, entry->name, &Connector::name);
    try {
      return connector->connect(place, options, rendezvous);
    } catch (TransportUnavailable const& reason) {
      std::string const text =
          concat("transport ", entry->name, " cannot be used: ", reason.what());
      if (entry == entries.back()) throw TransportUnavailable(text);
      if (place.rank == 0) place.warn(text);
    }
  }
  throw Error("no transport is automatic");
}

}  // namespace sparsecomm
