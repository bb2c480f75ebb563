// The batches that have operations pending, as a rank tells the others of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/operation.h"
#include "engine/proposal.h"

namespace sparsecomm {

class PendingBatches {
 public:
  void clear() { parts_.clear(); }
  // An operation of that batch, or of none, is pending. Ranks know it by that name.
  void add(Batch const* batch, std::string_view name) {
    if (batch == nullptr || batch == &batch_of_one) return;
    auto part = std::ranges::find(parts_, batch, &Part::batch);
    if (part == parts_.end()) part = parts_.insert(part, {.batch = batch});
    ++part->pending;
    part->names += Digest().add(name).value();
  }
  // Whether all that is left of them is pending.
  bool complete() const {
    return std::ranges::all_of(parts_,
                               [](Part const& part) { return part.batch->left() == part.pending; });
  }
  // Of which operation belongs to which.
  std::uint64_t digest() const {
    std::uint64_t digest = 0;
    for (Part const& part : parts_) digest += Digest().add(part.names).value();
    return digest;
  }

 private:
  struct Part {
    Batch const* batch;
    std::size_t pending = 0;
    std::uint64_t names = 0;  // the sum of their digests
  };
  std::vector<Part> parts_;
};

}  // namespace sparsecomm
