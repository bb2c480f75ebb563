// The transport that is always there: point-to-point messages of a torch process group (gloo).
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/fork_guard.h"
#include "transport/transport.h"

namespace sparsecomm {

// `group` must be the transport's alone: no one else may hold it, since destroying it is how its
// connections are closed when an operation fails, and its tags are the transport's. `store` carries
// failure reports, `run` is the communicator's (Transport::run), `guards` are those of its
// connections.
std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> group,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               std::uint32_t run, std::vector<ForkGuard> guards);

}  // namespace sparsecomm
