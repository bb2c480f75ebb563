// Ranks that meet in a torch store.
#pragma once

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/rendezvous.h"

namespace sparsecomm {

// `store` is for these ranks and this purpose alone, over a connection of its own: a wait here
// would block others that use it. Ranks that do not come within `timeout` are named by a Timeout.
// Once `interrupted`, which must live as long as somebody meets, meeting throws Aborted.
std::shared_ptr<Rendezvous> make_store_rendezvous(int rank, int size,
                                                  c10::intrusive_ptr<c10d::Store> store,
                                                  Duration timeout,
                                                  std::atomic<bool> const& interrupted);

}  // namespace sparsecomm
