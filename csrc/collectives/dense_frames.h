// What the dense allreduces share: regions of a vector as frames, and their reduction.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/dense.h"

namespace sparsecomm {

template <class T>
class DenseFrames {
 public:
  using V = accumulate_t<T>;

  static constexpr std::size_t bytes(std::size_t elements) {
    return header_bytes + elements * sizeof(T);
  }

  // Writes elements [first, first + values.size()), rounded to T, to the front of `out`.
  std::span<const std::byte> encode(Channel const& channel, std::uint64_t first,
                                    std::span<const V> values, std::span<std::byte> out) {
    if constexpr (std::is_same_v<T, V>) {
      return encode_as_is(channel, first, values, out);
    } else {
      rounded_.resize(values.size());
      std::ranges::transform(values, rounded_.begin(), [](V x) { return static_cast<T>(x); });
      return encode_as_is(channel, first, rounded_, out);
    }
  }
  static std::span<const std::byte> encode_as_is(Channel const& channel, std::uint64_t first,
                                                 std::span<const T> values,
                                                 std::span<std::byte> out) {
    return out.first(
        encode_dense<T>(channel.stamp(), static_cast<std::uint32_t>(first), values, out));
  }

  // Combines `into` with a peer's frame of the same elements.
  void reduce(Channel& channel, int peer, FrameView const& frame, std::uint64_t first,
              std::span<V> into, Reduction reduction) {
    incoming_.resize(into.size());
    copy(channel, peer, frame, first, incoming_);
    visit_reduction<V>(reduction, [&](auto combine) {
      std::ranges::transform(into, incoming_, into.begin(), [&](V ours, T theirs) {
        return combine(ours, static_cast<V>(theirs));
      });
    });
  }
  static void copy(Channel& channel, int peer, FrameView const& frame, std::uint64_t first,
                   std::span<T> out) {
    channel.decode_from(peer,
                        [&] { decode_dense<T>(frame, static_cast<std::uint32_t>(first), out); });
  }

  static void widen(std::span<const T> from, std::span<V> to) {
    std::ranges::transform(from, to.begin(), [](T x) { return static_cast<V>(x); });
  }
  // A quotient by 1 is the dividend.
  static void finish(std::span<const V> from, V divisor, std::span<T> to) {
    std::ranges::transform(from, to.begin(), [=](V x) { return static_cast<T>(x / divisor); });
  }

 private:
  std::vector<T> rounded_, incoming_;
};

// The makers of an algorithm whose class template is A<T>, constructed from the options and, if it
// takes them, the services.
template <template <class> class A>
struct MakeDenseOf {
  template <class T>
  static std::unique_ptr<DenseAllreduce<T>> make(AlgorithmOptions const& options,
                                                 Services const& services) {
    return make_algorithm<A<T>>(options, services);
  }
  static constexpr DenseMakers makers(std::uint64_t (*largest)(std::uint64_t, int),
                                      bool rounds_once = false) {
    return {make<float>,        make<double>,       make<Half>, make<BFloat16>,
            make<std::int32_t>, make<std::int64_t>, largest,    rounds_once};
  }
};

}  // namespace sparsecomm
