// What is selected of a tensor, and by which threshold.
#include <algorithm>

#include "base/buffer.h"
#include "kernels/parallel.h"
#include "kernels/top_k.h"
#include "ops_cuda.h"

namespace sparsecomm::ops {
namespace {

// Room for a selection, from pages that cost nothing until they are written.
template <class V>
class Room {
 public:
  explicit Room(std::size_t entries) : packed_{indices_.take(entries), values_.take(entries)} {}
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
  require_same_device(gradient, tensor, name);
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

// The same on a device, with the same steps.
template <class T>
Pair feed_back(DeviceCall const& call, FusedArguments<T> const& arguments,
               std::optional<Threshold<accumulate_t<T>>> const& threshold, std::uint64_t k,
               std::size_t limit) {
  using V = accumulate_t<T>;
  auto const& kernels = call.library().template kernels<T>();
  std::size_t const size = arguments.gradient.size();
  if (!threshold) limit = std::min<std::uint64_t>(limit, k);
  DeviceSelection<V> selection(call, size, limit);
  cuda::ErrorFeedbackArguments<T> on_device{.gradient = arguments.gradient.data(),
                                            .residual = arguments.residual.data(),
                                            .size = size,
                                            .scale = arguments.scale};
  if (!arguments.momentum.empty()) {
    on_device.momentum = arguments.momentum.data();
    on_device.momentum_factor = arguments.factor;
    on_device.mask_momentum = arguments.mask_momentum;
  }
  auto const run = [&] {
    kernels.fused_error_feedback(on_device, selection.state(), selection.packed(),
                                 selection.workspace(), call.stream());
  };
  bool mask_later = false;
  if (threshold) {
    selection.begin(*threshold);
  } else {
    if (arguments.scale != 1 || on_device.momentum != nullptr) {
      DeviceSelection<V> none(call, size, 0);
      none.begin({std::numeric_limits<V>::max(), 0});
      kernels.fused_error_feedback(on_device, none.state(), none.packed(), none.workspace(),
                                   call.stream());
      mask_later = on_device.momentum != nullptr && arguments.mask_momentum;
      on_device = {.gradient = on_device.gradient, .residual = on_device.residual, .size = size};
    }
    Segment<T> const all{arguments.gradient, arguments.residual};
    selection.begin(DeviceThreshold<T>(call.queue()).exact({&all, 1}, k));
  }
  run();
  Pair const found = selection.found();
  if (mask_later) {
    auto const count = static_cast<std::size_t>(std::get<0>(found).numel());
    at::Tensor const zeros = at::zeros_like(std::get<1>(found));
    at::Tensor outside = call.zeroed<std::uint32_t>();
    call.library().template kernels<V>().scatter(
        arguments.momentum.data(), size, positions(std::get<0>(found)).data(),
        entries<V>(zeros).data(), count, V{1}, 0, entries<std::uint32_t>(outside).data(),
        call.stream());
  }
  return found;
}

Pair fused_feedback(at::Tensor const& gradient, at::Tensor const& residual,
                    std::optional<at::Tensor> const& threshold,
                    std::optional<at::Tensor> const& ties, std::optional<std::int64_t> k,
                    std::optional<std::int64_t> limit, double scale,
                    std::optional<at::Tensor> const& momentum, double factor, bool mask_momentum) {
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
    FusedArguments<T> const arguments{.gradient = entries<T>(g.contiguous()),
                                      .residual = entries<V>(r.contiguous()),
                                      .scale = static_cast<V>(scale),
                                      .momentum = entries<V>(u.contiguous()),
                                      .factor = static_cast<V>(factor),
                                      .mask_momentum = mask_momentum};
    std::uint64_t const wanted = require_count(k.value_or(0), "k");
    Pair packed = on_device(gradient)
                      ? feed_back<T>(DeviceCall(gradient), arguments, cut, wanted, most)
                      : feed_back<T>(arguments, cut, wanted, most);
    g.store();
    r.store();
    u.store();
    return packed;
  });
}

Pair select_entries(at::Tensor const& input, at::Tensor const& threshold,
                    std::optional<at::Tensor> const& ties, std::optional<std::int64_t> limit) {
  return visit_gradient(input, "input", [&]<class T>() {
    using V = accumulate_t<T>;
    require_int32_indices(input.numel(), "input");
    std::size_t const most = most_packed(input.numel(), limit);
    Threshold<V> cut = threshold_of<V>(threshold, ties);
    at::Tensor const x = input.contiguous();
    if (on_device(input)) {
      DeviceCall const call(input);
      auto const from = entries<const T>(x);
      DeviceSelection<V> selection(call, from.size(), most);
      selection.begin(cut);
      call.library().template kernels<T>().select(from.data(), from.size(), 0, selection.state(),
                                                  selection.packed(), selection.workspace(),
                                                  call.stream());
      return selection.found();
    }
    Room<V> const room(most);
    SelectionScratch<V> scratch;
    return room.copy(
        select<T>(entries<const T>(x), cut, 0, most, room.packed(), scratch, *executor()).count);
  });
}

template <class T>
Pair top_k_on_device(at::Tensor const& x, std::size_t row, std::optional<std::int64_t> bucket,
                     std::size_t k, std::size_t count) {
  using V = accumulate_t<T>;
  DeviceCall const call(x);
  auto const from = entries<const T>(x);
  Pair out{call.empty(static_cast<std::int64_t>(count), at::kInt),
           call.empty(static_cast<std::int64_t>(count), scalar_type<V>)};
  if (count == 0) return out;
  cuda::Packed<V> to{entries<std::uint32_t>(std::get<0>(out)).data(),
                     entries<V>(std::get<1>(out)).data()};
  if (bucket || row <= max_bucket) {
    call.library().template kernels<T>().top_k_per_bucket(
        from.data(), from.size(), row, bucket ? static_cast<std::size_t>(*bucket) : row, k, to,
        call.stream());
    return out;
  }
  std::size_t const each = std::min(k, row);
  DeviceThreshold<T> threshold(call.queue());
  for (std::size_t begin = 0; begin < from.size(); begin += row) {
    top_k_of_row<T>(call, from.subspan(begin, row), each, to, threshold);
    to.indices += each;
    to.values += each;
  }
  return out;
}

Pair top_k(at::Tensor const& input, std::int64_t k, std::optional<std::int64_t> bucket) {
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
    if (on_device(input)) {
      auto const [indices, values] = top_k_on_device<T>(x, row, bucket, each, count);
      return Pair{indices.view(sizes), values.view(sizes)};
    }
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

// find(segments of T) -> Threshold; find_on_device(DeviceThreshold<T>, segments of T) too.
template <class F, class G>
Pair find_threshold(at::Tensor const& gradient, std::optional<at::Tensor> const& residual,
                    std::int64_t k, F&& find, G&& find_on_device) {
  return visit_gradient(gradient, "gradient", [&]<class T>() {
    using V = accumulate_t<T>;
    require(k >= 1, "k = ", k, " is below 1");
    if (residual) require_companion<V>(*residual, gradient, "residual");
    at::Tensor const g = gradient.contiguous();
    std::optional<at::Tensor> r;
    if (residual) r = residual->contiguous();
    Segment<T> const all = segment_of<T>(g, r);
    std::span<const Segment<T>> const segments(&all, 1);
    auto const count = static_cast<std::uint64_t>(k);
    Threshold<V> found;
    if (on_device(gradient)) {
      DeviceCall const call(gradient);
      found = find_on_device(DeviceThreshold<T>(call.queue()), segments, count);
    } else {
      found = find(segments, count);
    }
    auto const ties = std::min<std::uint64_t>(found.ties, std::numeric_limits<std::int64_t>::max());
    auto const options = gradient.options();
    return Pair{at::scalar_tensor(found.magnitude, options.dtype(scalar_type<V>)),
                at::scalar_tensor(static_cast<std::int64_t>(ties), options.dtype(at::kLong))};
  });
}

Pair threshold_exact(at::Tensor const& gradient, std::int64_t k,
                     std::optional<at::Tensor> const& residual) {
  return find_threshold(
      gradient, residual, k,
      []<class T>(std::span<const Segment<T>> segments, std::uint64_t count) {
        ThresholdScratch<accumulate_t<T>> scratch;
        return exact_threshold<T>(segments, count, scratch, *executor());
      },
      [](auto&& device, auto segments, std::uint64_t count) {
        return device.exact(segments, count);
      });
}

Pair threshold_sampled(at::Tensor const& gradient, std::int64_t k,
                       std::optional<at::Tensor> const& residual, std::int64_t stride,
                       std::int64_t phase) {
  require(stride >= 1, "stride = ", stride, " is below 1");
  auto const first = static_cast<std::size_t>(require_count(phase, "phase"));
  return find_threshold(
      gradient, residual, k,
      [&]<class T>(std::span<const Segment<T>> segments, std::uint64_t n) {
        ThresholdScratch<accumulate_t<T>> scratch;
        return sampled_threshold<T>(segments, n, static_cast<std::size_t>(stride), first, scratch,
                                    *executor());
      },
      [&](auto&& device, auto segments, std::uint64_t n) {
        return device.sampled(segments, n, static_cast<std::size_t>(stride), first);
      });
}

Pair threshold_gaussian(at::Tensor const& gradient, std::int64_t k,
                        std::optional<at::Tensor> const& residual) {
  return find_threshold(
      gradient, residual, k,
      []<class T>(std::span<const Segment<T>> segments, std::uint64_t count) {
        return gaussian_threshold<T>(segments, count);
      },
      [](auto&& device, auto segments, std::uint64_t count) {
        return device.gaussian(segments, count);
      });
}

void implement_selection(torch::Library& library) {
  library.impl("fused_error_feedback", TORCH_FN(Operator<&fused_feedback>::call));
  library.impl("select", TORCH_FN(Operator<&select_entries>::call));
  library.impl("top_k", TORCH_FN(Operator<&top_k>::call));
  library.impl("threshold_exact", TORCH_FN(Operator<&threshold_exact>::call));
  library.impl("threshold_sampled", TORCH_FN(Operator<&threshold_sampled>::call));
  library.impl("threshold_gaussian", TORCH_FN(Operator<&threshold_gaussian>::call));
}

}  // namespace

TORCH_LIBRARY_IMPL(sparsecomm, CPU, library) { implement_selection(library); }
TORCH_LIBRARY_IMPL(sparsecomm, CUDA, library) { implement_selection(library); }

}  // namespace sparsecomm::ops
