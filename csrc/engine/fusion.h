// Tensor fusion: allreduces that run one after another are exchanged as segments of one, so that
// their messages, which are small, are as few as those of one (Horovod: Sergeev and Del Balso
// 2018). Only algorithms that give an entry the same bits wherever it lies take part
// (AlgorithmEntry::fusible), so that results do not depend on what happened to be ready together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "collectives/algorithm.h"

namespace sparsecomm {

// An allreduce on which ranks have agreed, before it runs.
class Fusible {
 public:
  // The same on all ranks.
  struct Terms {
    AlgorithmEntry const* algorithm = nullptr;
    DType dtype = DType::f32;  // V of the FusibleAllreduce<V> that this is
    Reduction reduction = Reduction::sum;
    std::uint64_t extent = 0;
    std::uint64_t entries = 0;  // the most that any rank contributes
    std::uint64_t bytes = 0;    // of so many entries

    bool goes_with(Terms const& other) const {
      return algorithm == other.algorithm && dtype == other.dtype && reduction == other.reduction;
    }
  };
  virtual Terms const& terms() const = 0;

 protected:
  ~Fusible() = default;
};

// One whose sums are made in V.
template <class V>
class FusibleAllreduce : public Fusible {
 public:
  // This rank's contribution, until take().
  virtual SparseView<V> contribution() = 0;               // if the algorithm is sparse
  virtual void write_contribution(std::span<V> out) = 0;  // if not
  // Keeps what it needs of the reduction, of which its own begins at `first`, for run().
  virtual void take(StreamView<V> const& whole, std::uint64_t first) = 0;

 protected:
  ~FusibleAllreduce() = default;
};

// Decides which of the operations of one round are exchanged together.
class Fusion {
 public:
  // `most_bytes`: that a rank contributes to what is exchanged together, at most; 0: nothing is.
  explicit Fusion(std::size_t most_bytes) : most_bytes_(most_bytes) {}

  void clear();
  // In the order in which they run; null: one that is exchanged alone. The same on all ranks.
  void add(Fusible* fusible);
  // What the operation that was added as number `place` exchanges when it runs, its own first;
  // empty if that is only its own, or nothing since another one does so. Until the next call.
  std::span<Fusible* const> led_by(std::size_t place);
  // The place of the one that exchanges it; none: itself.
  std::optional<std::size_t> leader_of(std::size_t place) const;

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct Member {
    Fusible* fusible;
    std::size_t leader = none;  // of its group; none: it is in no group
    std::size_t next = none;    // the place of the next of its group
  };
  struct Group {
    Fusible::Terms terms;  // of the first; extent and bytes are of all
    std::size_t first, last;
  };

  std::size_t most_bytes_;
  std::vector<Member> members_;  // [place]
  std::vector<Group> groups_;
  std::vector<Fusible*> together_;
};

}  // namespace sparsecomm
