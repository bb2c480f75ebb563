// The figures that a planner predicts with, measured where they will be used: on this transport and
// this processor, while all ranks send and compute at once.
#pragma once

#include "base/clock.h"
#include "collectives/channel.h"
#include "engine/planner.h"

namespace sparsecomm {

// Collective; every rank returns the same. Small messages to the partners of a Bruck allgather for
// the link's latency, several at once for the overhead, growing ones until they take long enough
// for its bandwidth; then the kernels. Takes some tens of milliseconds, at most about 300 on links
// of 100 Mbit/s and more. 20 log P messages, up to 16 MiB.
Figures calibrate(Channel& channel, Clock const& clock);

// The kernels alone, on this rank, as on a core of their own.
Rates measure_rates();

}  // namespace sparsecomm
