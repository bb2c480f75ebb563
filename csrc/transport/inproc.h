// Ranks as threads of one process: for tests, and for programs without a network. Messages are
// copied into the receiver's mailbox when posted, so sends complete at once.
#pragma once

#include <memory>
#include <vector>

#include "base/runtime.h"
#include "transport/transport.h"

namespace sparsecomm {

// Makes the connected transports of `size` ranks. Each may outlive the others: a transport that is
// destroyed counts as a lost peer for those that wait for it.
std::vector<std::unique_ptr<Transport>> make_inproc_transports(int size, Runtime runtime = {});

}  // namespace sparsecomm
