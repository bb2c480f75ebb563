// The figures that a planner predicts with, measured where they will be used: on this transport and
// this processor, while all ranks send and compute at once.
#pragma once

#include <cstddef>
#include <vector>

#include "base/buffer.h"
#include "base/clock.h"
#include "collectives/frame_allgather.h"
#include "engine/planner.h"

namespace sparsecomm {

// What messages point to while they travel.
struct CalibrationBuffers {
  ByteBuffer outgoing, incoming;
  std::vector<std::byte> own;
  FrameAllgather gather;
};

// Collective; every rank returns the same, and sends as many messages. Small messages to the
// partners of a Bruck allgather for the link's latency, several at once for the overhead, growing
// ones until they take long enough for its bandwidth; then the kernels, over growing vectors. Under
// 300 ms on links of 100 Mbit/s and more, also where 8 ranks share two busy cores: by each part's
// limit of time nothing larger is begun. Messages: up to 63 log P, of up to 16 MiB, and 16 min(8, P
// - 1). With aggregators, sums of a few bytes and of growing arrays go through them, for as long.
//
// Where it throws, the transport may still write into the buffers: they must outlive it then.
Figures calibrate(Channel& channel, Clock const& clock, CalibrationBuffers& buffers,
                  Services const& services = {});

// What the ranks of a busy machine may take for it.
inline constexpr Duration calibration_allowance = std::chrono::seconds(1);

// The kernels alone, on this rank, as on a core of their own; about 100 ms.
Rates measure_rates();

}  // namespace sparsecomm
