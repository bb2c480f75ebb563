// From the name of a transport, or "auto", to one that connects the ranks of a group.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/transports.h"

namespace sparsecomm {

struct ConnectOptions {
  std::string transport = "auto";
  TransportLibraries libraries;
  Duration timeout = std::chrono::minutes(30);  // for all ranks to come
};

// What a group of ranks brings along.
struct ConnectPlace {
  int rank = 0, size = 1;
  // For these ranks and this purpose alone, over a connection that nobody else uses.
  c10::intrusive_ptr<c10d::Store> store;
  // Connects the ranks through `store`; called on every rank or on none.
  std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store> store)> make_gloo;
  // Told, on rank 0, what "auto" could not use and why.
  std::function<void(std::string const&)> warn;
};

// Collective. Throws InvalidArgument where no transport has that name or it does not connect
// processes; Timeout where ranks did not come; TransportUnavailable, with the same text on every
// rank, where ranks ask for different ones or the one asked for by name cannot be used on some
// rank. "auto" takes the first automatic one that works on all. Throws Aborted once `interrupted`.
std::unique_ptr<Transport> connect(ConnectPlace const& place, ConnectOptions const& options,
                                   std::atomic<bool> const& interrupted);

// Connects when the first message is posted, on the thread that posts it; until then it has the
// name "unconnected". `connect` is given what becomes true when the transport is aborted.
std::unique_ptr<Transport> make_lazy_transport(
    int rank, int size,
    std::function<std::unique_ptr<Transport>(std::atomic<bool> const& interrupted)> connect);

}  // namespace sparsecomm
