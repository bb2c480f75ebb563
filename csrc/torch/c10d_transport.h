// The transport that is always there: point-to-point messages of a torch process group (gloo).
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/transport.h"

namespace sparsecomm {

// `group` must be the transport's alone: no one else may hold it, since destroying it is how its
// connections are closed when an operation fails, and its tags are the transport's. `store` carries
// failure reports.
std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::Backend> group,
                                               c10::intrusive_ptr<c10d::Store> store);

}  // namespace sparsecomm
