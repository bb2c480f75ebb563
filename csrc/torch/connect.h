// From the name of a transport, or "auto", to one that connects the ranks of a group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/stall.h"
#include "engine/timeline.h"
#include "transport/transports.h"

namespace sparsecomm {

struct ConnectOptions {
  std::string transport = "auto";
  TransportLibraries libraries;
  Duration timeout = std::chrono::minutes(30);  // for all ranks to come
  std::string call = "the first operation";     // what every rank has to call, for messages
  std::string agreed;                           // what else is to be the same on all ranks
  StallOptions stall;                           // says which ranks have not come yet
  TimelineOptions timeline = {};                // of whoever uses the transport
};

// What a group of ranks brings along.
struct ConnectPlace {
  int rank = 0, size = 1;
  // The group's, which the application goes on using: it is only cloned.
  c10::intrusive_ptr<c10d::Store> store;
  // Connects the ranks through `store`, which is gloo's alone; called on every rank or on none.
  std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Store> store)> make_gloo;
  // Told, on rank 0, what "auto" could not use and why.
  std::function<void(std::string const&)> warn;
};

// Collective. Throws InvalidArgument where no transport has that name or it does not connect
// processes; Timeout where ranks did not come; TransportUnavailable, with the same text on every
// rank, where ranks ask for different ones, or do not agree on the rest, or the one asked for by
// name cannot be used on some rank. "auto" takes the first automatic one that works on all. `check`
// is called while other ranks are waited for, and throws to end that.
std::unique_ptr<Transport> connect(ConnectPlace const& place, ConnectOptions const& options,
                                   std::function<void()> const& check);

}  // namespace sparsecomm
