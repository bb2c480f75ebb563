// A transport that connects when it is first used.
#pragma once

#include <functional>
#include <memory>

#include "transport/transport.h"

namespace sparsecomm {

// Returns a transport that calls `connect` on the thread that first uses it. Until then it has the
// name "unconnected" and waits for nothing. `connect` gets a function that throws Aborted once the
// transport has been aborted, to be called while other ranks are waited for.
std::unique_ptr<Transport> make_lazy_transport(
    int rank, int size,
    std::function<std::unique_ptr<Transport>(std::function<void()> const& check)> connect);

}  // namespace sparsecomm
