#include "kernels/parallel.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels/selection.h"

namespace sparsecomm {
namespace {

// Entries: long enough for the hand-over to cost nothing, and some 20 of them for each of several
// threads in a gradient that takes milliseconds.
constexpr std::size_t part_size = std::size_t{1} << 16;

template <class T>
std::span<T> part_of(std::span<T> all, std::size_t part) {
  std::size_t const begin = part * part_size;
  return all.subspan(begin, std::min(part_size, all.size() - begin));
}

// pack(part, threshold, first index, out) selects from a part as if nothing had been selected
// before it. Only when the parts before it are done is it known how much room and how many ties are
// left: keep(indices) is told what stays selected, give_back(position, value) what does not.
template <class V, class Pack, class Keep, class GiveBack>
SelectionStats<V> select_in_parts(std::size_t size, Threshold<V>& threshold,
                                  std::uint32_t first_index, std::size_t limit, PackedSpan<V> out,
                                  SelectionScratch<V>& scratch, Executor const& executor,
                                  Pack&& pack, Keep&& keep, GiveBack&& give_back) {
  struct Slot {
    PackedSpan<V> packed;
    SelectionStats<V> stats;
    std::uint64_t ties;
    std::size_t place;
  };
  Selection<V> total(threshold, size, first_index, limit, out);
  std::size_t const parts = part_count(size, part_size);
  std::size_t const workers = std::min(executor.threads(), parts);
  auto const indices = scratch.indices.take(workers * part_size);
  auto const values = scratch.values.take(workers * part_size);
  std::vector<Slot> slots(workers);
  for (std::size_t worker = 0; worker < workers; ++worker) {
    slots[worker].packed = {indices.subspan(worker * part_size, part_size),
                            values.subspan(worker * part_size, part_size)};
  }

  auto const work = [&](std::size_t part, std::size_t worker) {
    Slot& slot = slots[worker];
    Threshold<V> all_ties = threshold;
    slot.stats = pack(part, all_ties, first_index + static_cast<std::uint32_t>(part * part_size),
                      slot.packed);
    slot.ties = threshold.ties - all_ties.ties;
  };
  auto const claim = [&](std::size_t, std::size_t worker) {
    Slot& slot = slots[worker];
    SelectionStats<V> const& stats = slot.stats;
    total.see(magnitude_bits(stats.max_magnitude));
    total.finite &= stats.finite;
    slot.place = total.count;
    if (stats.count <= limit - total.count && slot.ties <= total.ties) {
      total.count += stats.count;
      total.ties -= slot.ties;
      return;
    }
    for (std::size_t i = 0; i < stats.count; ++i) {
      std::uint32_t const index = slot.packed.indices[i];
      V const value = slot.packed.values[i];
      if (!total.offer(value, index)) give_back(index - first_index, value);
    }
    keep(std::span(total.indices + slot.place, total.count - slot.place));
    slot.stats.count = 0;
  };
  auto const finish = [&](std::size_t, std::size_t worker) {
    Slot const& slot = slots[worker];
    keep(slot.packed.indices.first(slot.stats.count));
    std::copy_n(slot.packed.indices.begin(), slot.stats.count, total.indices + slot.place);
    std::copy_n(slot.packed.values.begin(), slot.stats.count, total.values + slot.place);
  };
  for_each_part_in_order(executor, parts, work, claim, finish);
  return total.finish(threshold);
}

}  // namespace

template <class T>
bool all_finite(std::span<const T> x, Executor const& executor, KernelTable<T> const& kernel) {
  if (executor.threads() == 1 || x.size() <= part_size) return kernel.all_finite(x);
  std::atomic<bool> finite = true;
  for_each_part(executor, part_count(x.size(), part_size), [&](std::size_t part, std::size_t) {
    if (finite.load(std::memory_order_relaxed) && !kernel.all_finite(part_of(x, part))) {
      finite.store(false, std::memory_order_relaxed);
    }
  });
  return finite;
}

template <class T>
SelectionStats<accumulate_t<T>> fused_error_feedback(FusedArguments<T> const& arguments,
                                                     Threshold<accumulate_t<T>>& threshold,
                                                     std::uint32_t first_index, std::size_t limit,
                                                     PackedSpan<accumulate_t<T>> out,
                                                     SelectionScratch<accumulate_t<T>>& scratch,
                                                     Executor const& executor,
                                                     KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  std::size_t const size = arguments.gradient.size();
  if (executor.threads() == 1 || size <= part_size) {
    return kernel.fused_error_feedback(arguments, threshold, first_index, limit, out);
  }
  require_same_size(size, arguments.residual.size());
  bool const has_momentum = !arguments.momentum.empty();
  if (has_momentum) require_same_momentum(size, arguments.momentum.size());
  auto const pack = [&](std::size_t part, Threshold<V>& ties, std::uint32_t first,
                        PackedSpan<V> packed) {
    FusedArguments<T> of_part = arguments;
    of_part.gradient = part_of(arguments.gradient, part);
    of_part.residual = part_of(arguments.residual, part);
    if (has_momentum) of_part.momentum = part_of(arguments.momentum, part);
    // What is given back needs its momentum.
    of_part.mask_momentum = false;
    return kernel.fused_error_feedback(of_part, ties, first, part_size, packed);
  };
  auto const keep = [&](std::span<const std::uint32_t> indices) {
    if (!has_momentum || !arguments.mask_momentum) return;
    for (std::uint32_t const index : indices) arguments.momentum[index - first_index] = 0;
  };
  auto const give_back = [&](std::size_t position, V value) {
    arguments.residual[position] = value;
  };
  return select_in_parts<V>(size, threshold, first_index, limit, out, scratch, executor, pack, keep,
                            give_back);
}

template <class T>
SelectionStats<accumulate_t<T>> select(std::span<const T> x, Threshold<accumulate_t<T>>& threshold,
                                       std::uint32_t first_index, std::size_t limit,
                                       PackedSpan<accumulate_t<T>> out,
                                       SelectionScratch<accumulate_t<T>>& scratch,
                                       Executor const& executor, KernelTable<T> const& kernel) {
  using V = accumulate_t<T>;
  if (executor.threads() == 1 || x.size() <= part_size) {
    return kernel.select(x, threshold, first_index, limit, out);
  }
  auto const pack = [&](std::size_t part, Threshold<V>& ties, std::uint32_t first,
                        PackedSpan<V> packed) {
    return kernel.select(part_of(x, part), ties, first, part_size, packed);
  };
  return select_in_parts<V>(
      x.size(), threshold, first_index, limit, out, scratch, executor, pack,
      [](std::span<const std::uint32_t>) {}, [](std::size_t, V) {});
}

#define SPARSECOMM_INSTANTIATE(T)                                                        \
  template bool all_finite(std::span<const T>, Executor const&, KernelTable<T> const&);  \
  template SelectionStats<accumulate_t<T>> fused_error_feedback(                         \
      FusedArguments<T> const&, Threshold<accumulate_t<T>>&, std::uint32_t, std::size_t, \
      PackedSpan<accumulate_t<T>>, SelectionScratch<accumulate_t<T>>&, Executor const&,  \
      KernelTable<T> const&);                                                            \
  template SelectionStats<accumulate_t<T>> select(                                       \
      std::span<const T>, Threshold<accumulate_t<T>>&, std::uint32_t, std::size_t,       \
      PackedSpan<accumulate_t<T>>, SelectionScratch<accumulate_t<T>>&, Executor const&,  \
      KernelTable<T> const&)
SPARSECOMM_INSTANTIATE(float);
SPARSECOMM_INSTANTIATE(double);
SPARSECOMM_INSTANTIATE(Half);
SPARSECOMM_INSTANTIATE(BFloat16);
#undef SPARSECOMM_INSTANTIATE

}  // namespace sparsecomm
