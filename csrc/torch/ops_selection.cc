// What is selected of a tensor, and by which threshold.
#include <algorithm>

#include "base/buffer.h"
#include "kernels/parallel.h"
#include "kernels/top_k.h"
#include "ops.h"

namespace sparsecomm::ops {
namespace {

// Room for a selection, from pages that cost nothing until they are written.
template <class V>
class Room {
 public:
  explicit Room(std::size_t entries)
      : packed_{indices_.take(entries + packed_slack), values_.take(entries + packed_slack)} {}
  PackedSpan<V> packed() const { return packed_; }
  Pair copy(std::size_t count) const {
    return copy_packed<V>(packed_.indices.first(count), packed_.values.first(count));
  }

 private:
  Buffer<std::uint32_t> indices_;
  Buffer<V> values_;
  PackedSpan<V> packed_;
};

std::size_t most_packed(std::int64_t size, std::optional<std::int64_t> limit) {
  auto const all = static_cast<std::uint64_t>(size);
  return std::min(all, limit ? require_count(*limit, "limit") : all);
}

// Without a residual the gradient alone is meant.
template <class T>
Segment<T> segment_of(at::Tensor const& gradient, std::optional<at::Tensor> const& residual) {
  Segment<T> segment{entries<T>(gradient), {}};
  if (residual) segment.residual = entries<accumulate_t<T>>(*residual);
  return segment;
}

template <class V>
void require_companion(at::Tensor const& tensor, at::Tensor const& gradient, char const* name) {
  require_type<V>(tensor, name);
  require(tensor.sizes() == gradient.sizes(), name, " has the shape ", tensor.sizes(),
          ", the gradient ", gradient.sizes(), "; give both the same");
}

// What fused_error_feedback works on. The k largest are chosen at the threshold of `gradient` and
// `residual`; where the entries are not their sum, they are first made the residual.
template <class T>
Pair feed_back(FusedArguments<T> arguments, std::optional<Threshold<accumulate_t<T>>> threshold,
               std::uint64_t k, std::size_t limit) {
  using V = accumulate_t<T>;
  auto const threads = executor();
  SelectionScratch<V> scratch;
  std::span<V> to_mask;
  if (!threshold) {
    limit = std::min<std::uint64_t>(limit, k);
    if (arguments.scale != 1 || !arguments.momentum.empty()) {
      Room<V> const none(0);
      Threshold<V> nothing{std::numeric_limits<V>::max(), 0};
      fused_error_feedback<T>(arguments, nothing, 0, 0, none.packed(), scratch, *threads);
      if (arguments.mask_momentum) to_mask = arguments.momentum;
      arguments = {.gradient = arguments.gradient, .residual = arguments.residual};
    }
    ThresholdScratch<V> magnitudes;
    Segment<T> const all{arguments.gradient, arguments.residual};
    threshold = exact_threshold<T>({&all, 1}, k, magnitudes, *threads);
  }
  Room<V> const room(limit);
  auto const found =
      fused_error_feedback<T>(arguments, *threshold, 0, limit, room.packed(), scratch, *threads);
  if (!to_mask.empty()) {
    for (std::uint32_t const i : room.packed().indices.first(found.count)) to_mask[i] = 0;
  }
  return room.copy(found.count);
}

Pair fused_error_feedback_cpu(at::Tensor const& gradient, at::Tensor const& residual,
                              std::optional<at::Tensor> const& threshold,
                              std::optional<at::Tensor> const& ties, std::optional<std::int64_t> k,
                              std::optional<std::int64_t> limit, double scale,
                              std::optional<at::Tensor> const& momentum, double factor,
                              bool mask_momentum) {
  return visit_gradient(gradient, "gradient", [&]<class T>() {
    using V = accumulate_t<T>;
    require_int32_indices(gradient.numel(), "gradient");
    require(threshold.has_value() != k.has_value() && (threshold || !ties),
            "give a threshold (with or without ties), or k");
    require(!k || *k >= 1, "k = ", k.value_or(0), " is below 1");
    require_companion<V>(residual, gradient, "residual");
    require_apart(gradient, residual, "gradient and residual");
    if (momentum) {
      require_companion<V>(*momentum, gradient, "momentum");
      require_apart(gradient, *momentum, "gradient and momentum");
      require_apart(residual, *momentum, "residual and momentum");
    }
    std::size_t const most = most_packed(gradient.numel(), limit);
    std::optional<Threshold<V>> cut;
    if (threshold) cut = threshold_of<V>(*threshold, ties);

    InPlace const g(gradient, "gradient");
    InPlace const r(residual, "residual");
    InPlace const u(momentum ? *momentum : at::empty({0}, scalar_type<V>), "momentum");
    Pair packed = feed_back<T>({.gradient = entries<T>(g.contiguous()),
                                .residual = entries<V>(r.contiguous()),
                                .scale = static_cast<V>(scale),
                                .momentum = entries<V>(u.contiguous()),
                                .factor = static_cast<V>(factor),
                                .mask_momentum = mask_momentum},
                               cut, require_count(k.value_or(0), "k"), most);
    g.store();
    r.store();
    u.store();
    return packed;
  });
}

Pair select_cpu(at::Tensor const& input, at::Tensor const& threshold,
                std::optional<at::Tensor> const& ties, std::optional<std::int64_t> limit) {
  return visit_gradient(input, "input", [&]<class T>() {
    using V = accumulate_t<T>;
    require_int32_indices(input.numel(), "input");
    std::size_t const most = most_packed(input.numel(), limit);
    Threshold<V> cut = threshold_of<V>(threshold, ties);
    at::Tensor const x = input.contiguous();
    Room<V> const room(most);
    SelectionScratch<V> scratch;
    return room.copy(
        select<T>(entries<const T>(x), cut, 0, most, room.packed(), scratch, *executor()).count);
  });
}

Pair top_k_cpu(at::Tensor const& input, std::int64_t k, std::optional<std::int64_t> bucket) {
  return visit_gradient(input, "input", [&]<class T>() {
    using V = accumulate_t<T>;
    require(input.dim() > 0, "input has no dimension; give it at least one");
    auto const each = static_cast<std::size_t>(require_count(k, "k"));
    auto const row = static_cast<std::size_t>(input.size(-1));
    require_int32_indices(input.size(-1), "a row of input");
    require(!bucket || (*bucket >= 1 && *bucket <= std::int64_t{max_bucket}),
            "bucket = ", bucket.value_or(0), " is not in [1, ", max_bucket, "]");
    auto sizes = input.sizes().vec();
    std::uint64_t const packed = bucket_top_k_count(
        row, bucket ? static_cast<std::uint64_t>(*bucket) : std::max<std::size_t>(row, 1), each);
    sizes.back() = static_cast<std::int64_t>(packed);
    auto const count = static_cast<std::size_t>(c10::multiply_integers(sizes));

    at::Tensor const x = input.contiguous();
    Room<V> const room(count);
    PackedSpan<V> const out = room.packed();
    if (count > 0 && bucket) {
      top_k_per_bucket<T>(entries<const T>(x), row, static_cast<std::size_t>(*bucket), each,
                          {out.indices.first(count), out.values.first(count)}, *executor());
    } else if (count > 0) {
      TopKScratch<V> scratch;
      top_k_of_rows<T>(entries<const T>(x), row, each, out, scratch, *executor());
    }
    auto [indices, values] = room.copy(count);
    return Pair{indices.view(sizes), values.view(sizes)};
  });
}

// find(segments of T) -> Threshold.
template <class F>
Pair find_threshold(at::Tensor const& gradient, std::optional<at::Tensor> const& residual,
                    std::int64_t k, F&& find) {
  return visit_gradient(gradient, "gradient", [&]<class T>() {
    using V = accumulate_t<T>;
    require(k >= 1, "k = ", k, " is below 1");
    if (residual) require_companion<V>(*residual, gradient, "residual");
    at::Tensor const g = gradient.contiguous();
    std::optional<at::Tensor> r;
    if (residual) r = residual->contiguous();
    Segment<T> const all = segment_of<T>(g, r);
    Threshold<V> const found =
        find(std::span<const Segment<T>>(&all, 1), static_cast<std::uint64_t>(k));
    auto const ties = std::min<std::uint64_t>(found.ties, std::numeric_limits<std::int64_t>::max());
    return Pair{at::scalar_tensor(found.magnitude, scalar_type<V>),
                at::scalar_tensor(static_cast<std::int64_t>(ties), at::kLong)};
  });
}

Pair threshold_exact_cpu(at::Tensor const& gradient, std::int64_t k,
                         std::optional<at::Tensor> const& residual) {
  return find_threshold(gradient, residual, k,
                        []<class T>(std::span<const Segment<T>> segments, std::uint64_t count) {
                          ThresholdScratch<accumulate_t<T>> scratch;
                          return exact_threshold<T>(segments, count, scratch, *executor());
                        });
}

Pair threshold_sampled_cpu(at::Tensor const& gradient, std::int64_t k,
                           std::optional<at::Tensor> const& residual, std::int64_t stride,
                           std::int64_t phase) {
  require(stride >= 1, "stride = ", stride, " is below 1");
  auto const first = static_cast<std::size_t>(require_count(phase, "phase"));
  return find_threshold(gradient, residual, k,
                        [&]<class T>(std::span<const Segment<T>> segments, std::uint64_t n) {
                          ThresholdScratch<accumulate_t<T>> scratch;
                          return sampled_threshold<T>(segments, n, static_cast<std::size_t>(stride),
                                                      first, scratch, *executor());
                        });
}

Pair threshold_gaussian_cpu(at::Tensor const& gradient, std::int64_t k,
                            std::optional<at::Tensor> const& residual) {
  return find_threshold(gradient, residual, k,
                        []<class T>(std::span<const Segment<T>> segments, std::uint64_t count) {
                          return gaussian_threshold<T>(segments, count);
                        });
}

}  // namespace

TORCH_LIBRARY_IMPL(sparsecomm, CPU, library) {
  library.impl("fused_error_feedback", TORCH_FN(Operator<&fused_error_feedback_cpu>::call));
  library.impl("select", TORCH_FN(Operator<&select_cpu>::call));
  library.impl("top_k", TORCH_FN(Operator<&top_k_cpu>::call));
  library.impl("threshold_exact", TORCH_FN(Operator<&threshold_exact_cpu>::call));
  library.impl("threshold_sampled", TORCH_FN(Operator<&threshold_sampled_cpu>::call));
  library.impl("threshold_gaussian", TORCH_FN(Operator<&threshold_gaussian_cpu>::call));
}

}  // namespace sparsecomm::ops
