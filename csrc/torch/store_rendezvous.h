// Ranks that meet in a torch store.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/stall.h"
#include "transport/rendezvous.h"

namespace sparsecomm {

struct MeetingOptions {
  Duration timeout{};           // for all ranks to come; those missing are named by a Timeout
  std::function<void()> check;  // called while ranks wait; throws to end that
  StallOptions stall = {};      // a rank that waits longer says for which ranks
  std::string call = "the first operation";  // which all ranks make, for messages
};

struct StoreMeeting {
  std::shared_ptr<Rendezvous> rendezvous;
  // For these ranks and this communicator alone: its keys begin with an identity of 128 bits that
  // rank 0 has drawn.
  c10::intrusive_ptr<c10d::Store> store;
};

// Collective. `store` is for these ranks and this purpose alone, over a connection of its own: a
// wait here would block others that use it. Throws TransportUnavailable if `purpose` differs
// between ranks, with the same text everywhere, or if another process has come as this rank.
StoreMeeting meet_in_store(int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                           std::string const& purpose, MeetingOptions const& options);

}  // namespace sparsecomm
