// A transport that connects its ranks when the first message is posted, on the progress thread.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/clock.h"
#include "transport/transport.h"

namespace sparsecomm {

// Connects by splitting a second group off `gloo`, with `options`, over a connection of its own to
// `store`. The ranks that have not come within `timeout` are named by a Timeout.
std::unique_ptr<Transport> make_lazy_transport(c10::intrusive_ptr<c10d::Backend> gloo,
                                               c10::intrusive_ptr<c10d::Backend::Options> options,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               Duration timeout);

}  // namespace sparsecomm
