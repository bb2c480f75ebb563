#include "kernels/cuda/selection.cuh"
#include "kernels/cuda/tables.h"

namespace sparsecomm::cuda {
namespace {

template <class T>
void fused_error_feedback(ErrorFeedbackArguments<T> const& arguments, SelectionState* state,
                          Packed<accumulate_t<T>> out, void* workspace, Stream stream) {
  auto const run = [&](auto const& source) {
    run_selection("fused_error_feedback", source, arguments.size, arguments.first_index,
                  arguments.send_all, state, out, workspace, stream);
  };
  if (arguments.momentum != nullptr) {
    run(MomentumSource<T>{arguments});
  } else {
    run(FeedbackSource<T>{arguments});
  }
}

template <class T>
void select(T const* x, std::size_t size, std::uint32_t first_index, SelectionState* state,
            Packed<accumulate_t<T>> out, void* workspace, Stream stream) {
  run_selection("select", ReadSource<T>{x}, size, first_index, false, state, out, workspace,
                stream);
}

template <class T>
__global__ void look_for_not_finite(T const* x, std::size_t size, std::uint32_t* not_finite) {
  using V = accumulate_t<T>;
  bool found = false;
  for (std::size_t i = grid_thread(); i < size; i += grid_threads()) {
    found = found || magnitude_bits(widened(x[i])) > largest_finite_bits<V>;
  }
  if (found) *not_finite = 1;
}

template <class T>
void all_finite(T const* x, std::size_t size, std::uint32_t* not_finite, Stream stream) {
  if (size == 0) return;
  launch("all_finite", look_for_not_finite<T>, striding_blocks(size), block_threads, stream, x,
         size, not_finite);
}

__global__ void set_state(SelectionState initial, SelectionState* state) { *state = initial; }

}  // namespace

std::size_t selection_workspace(std::size_t size) {
  return look_back_bytes(divided_up(size, tile_entries));
}

void begin(SelectionState const& initial, SelectionState* state, Stream stream) {
  launch("begin", set_state, 1, 1, stream, initial, state);
}

template <class T>
void add_selection_kernels(Kernels<T>& table) {
  table.all_finite = all_finite<T>;
  table.fused_error_feedback = fused_error_feedback<T>;
  table.select = select<T>;
}

template void add_selection_kernels(Kernels<float>&);
template void add_selection_kernels(Kernels<double>&);
template void add_selection_kernels(Kernels<Half>&);
template void add_selection_kernels(Kernels<BFloat16>&);

}  // namespace sparsecomm::cuda
