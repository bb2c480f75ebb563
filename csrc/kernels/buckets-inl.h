// Top-k of buckets, with vectors. Included once per instruction set.
#if defined(SPARSECOMM_KERNELS_BUCKETS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPARSECOMM_KERNELS_BUCKETS_INL_H_
#undef SPARSECOMM_KERNELS_BUCKETS_INL_H_
#else
#define SPARSECOMM_KERNELS_BUCKETS_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/buckets.h"
#include "kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sparsecomm {
namespace HWY_NAMESPACE {

// Finds the k largest of one bucket after another: the rank bits lie in the first cache, and the
// one of rank k is searched by counting how many are no smaller than a guess.
template <class T>
class BucketTopK {
  using V = accumulate_t<T>;
  using D = hn::ScalableTag<V>;
  using Bits = hn::TFromD<Signed<D>>;

 public:
  // Puts the positions of the `count` largest of a bucket, 1 <= count <= bucket.size(), in order,
  // into found().
  void search(std::span<const T> bucket, std::size_t count) {
    load_bucket(bucket);
    Bits lowest = 0;
    std::size_t passing = bucket.size();
    // Above it are fewer than `count`. The search begins an octave below the largest.
    Bits above = static_cast<Bits>(largest_ + 1);
    using Step = magnitude_bits_t<V>;
    for (Step step = Step{1} << (std::numeric_limits<V>::digits - 1);
         step < static_cast<Step>(above); step *= 2) {
      Bits const guess = static_cast<Bits>(above - static_cast<Bits>(step));
      std::size_t const at_least = count_at_least(guess);
      if (at_least >= count) {
        lowest = guess;
        passing = at_least;
        break;
      }
      above = guess;
    }
    while (passing != count && above - lowest > 1) {
      Bits const guess = lowest + (above - lowest) / 2;
      std::size_t const at_least = count_at_least(guess);
      if (at_least >= count) {
        lowest = guess;
        passing = at_least;
      } else {
        above = guess;
      }
    }
    pack_at_least(lowest);
    if (passing != count) drop_ties(lowest, passing, passing - count);
  }

  std::uint32_t const* found() const { return found_.data(); }

 private:
  void load_bucket(std::span<const T> bucket) {
    D const d;
    Signed<D> const di;
    std::size_t const lanes = hn::Lanes(d);
    auto const infinity = hn::Set(di, static_cast<Bits>(infinity_bits<V>));
    auto most = hn::Zero(di);
    std::size_t i = 0;
    for (; bucket.size() - i >= lanes; i += lanes) {
      auto const bits = hn::Min(magnitudes(d, load(d, bucket.data() + i)), infinity);
      most = hn::Max(most, bits);
      hn::Store(bits, di, keys_.data() + i);
    }
    largest_ = hn::GetLane(hn::MaxOfLanes(di, most));
    for (; i < bucket.size(); ++i) {
      keys_[i] = static_cast<Bits>(rank_bits(widen(bucket[i])));
      largest_ = std::max(largest_, keys_[i]);
    }
    // Not counted: no guess is negative.
    for (; i % lanes != 0; ++i) keys_[i] = -1;
    end_ = i;
  }

  // Integers have no Ge on every target.
  std::size_t count_at_least(Bits guess) const {
    Signed<D> const di;
    auto const bound = hn::Set(di, static_cast<Bits>(guess - 1));
    std::size_t const lanes = hn::Lanes(di);
    std::size_t count = 0;
    for (std::size_t i = 0; i < end_; i += lanes) {
      count += hn::CountTrue(di, hn::Gt(hn::Load(di, keys_.data() + i), bound));
    }
    return count;
  }

  void pack_at_least(Bits lowest) {
    D const d;
    Signed<D> const di;
    auto const bound = hn::Set(di, static_cast<Bits>(lowest - 1));
    std::size_t const lanes = hn::Lanes(d);
    std::size_t count = 0;
    for (std::size_t i = 0; i < end_; i += lanes) {
      auto const pass = hn::Gt(hn::Load(di, keys_.data() + i), bound);
      store_set_lanes(d, hn::RebindMask(d, pass), static_cast<std::uint32_t>(i),
                      found_.data() + count);
      count += hn::CountTrue(di, pass);
    }
  }

  // Takes the last `surplus` of those that equal `lowest` from the `count` found.
  void drop_ties(Bits lowest, std::size_t count, std::size_t surplus) {
    std::size_t ties = 0;
    for (std::size_t i = 0; i < count; ++i) ties += keys_[found_[i]] == lowest;
    std::size_t wanted = ties - surplus;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (keys_[found_[i]] == lowest) {
        if (wanted == 0) continue;
        --wanted;
      }
      found_[kept++] = found_[i];
    }
  }

  HWY_ALIGN std::array<Bits, max_bucket + hn::MaxLanes(D())> keys_;
  std::array<std::uint32_t, max_bucket + hn::MaxLanes(D())> found_;
  Bits largest_;
  std::size_t end_;
};

template <class T>
void top_k_of_buckets(std::span<const T> x, std::size_t bucket, std::size_t k,
                      std::uint32_t first_index, PackedSpan<accumulate_t<T>> out) {
  require_buckets(x.size(), bucket, k, first_index, out);
  if (k == 0) return;
  BucketTopK<T> top;
  std::size_t place = 0;
  for (std::size_t begin = 0; begin < x.size(); begin += bucket) {
    auto const entries = x.subspan(begin, std::min(bucket, x.size() - begin));
    std::size_t const count = std::min(k, entries.size());
    top.search(entries, count);
    for (std::size_t i = 0; i < count; ++i, ++place) {
      std::uint32_t const position = top.found()[i];
      out.indices[place] = first_index + static_cast<std::uint32_t>(begin) + position;
      out.values[place] = widen(entries[position]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sparsecomm
HWY_AFTER_NAMESPACE();
#endif
