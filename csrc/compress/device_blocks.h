// Which blocks of consecutive entries have the largest norms, on a device.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "base/executor.h"
#include "compress/device_queue.h"
#include "compress/device_threshold.h"

namespace sparsecomm {

template <class V>
class DeviceBlocks {
 public:
  // The queue lives as long as this.
  explicit DeviceBlocks(DeviceQueue const& queue) : queue_(queue), threshold_(queue) {}

  // The numbers, on the device and until the next call, of at most `wanted` blocks, in order: those
  // that block_top_k chooses, but for blocks whose squares are zero. Waits for the device.
  std::pair<std::uint32_t const*, std::size_t> find(std::span<const V> x, std::size_t block,
                                                    std::size_t wanted) {
    cuda::Library const& library = *queue_.library;
    std::size_t const blocks = part_count(x.size(), block);
    double* const squares = squares_.take(queue_, blocks);
    library.kernels<V>().block_squares(x.data(), x.size(), block, squares, queue_.stream);
    Segment<double> const all{{squares, blocks}, {}};
    Threshold<double> const threshold = threshold_.exact({&all, 1}, wanted);
    cuda::SelectionState* const state = state_.take(queue_, 1);
    cuda::Packed<double> const out{numbers_.take(queue_, wanted), chosen_.take(queue_, wanted)};
    void* const workspace = workspace_.take(queue_, library.selection_workspace(blocks));
    library.begin(cuda::begin_selection(threshold, wanted), state, queue_.stream);
    library.f64.select(squares, blocks, 0, state, out, workspace, queue_.stream);
    return {out.indices, fetch(queue_, state, host_state_).count()};
  }

 private:
  DeviceQueue const& queue_;
  DeviceThreshold<double> threshold_;
  DeviceBuffer<double> squares_, chosen_;
  DeviceBuffer<std::uint32_t> numbers_;
  DeviceBuffer<cuda::SelectionState> state_;
  PinnedBuffer<cuda::SelectionState> host_state_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace sparsecomm
