// The rule by which a rank selects of its gradient, and the selectors, of which it takes one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sparsecomm {

// How gradients are summed up before anything is selected (momentum correction): with a velocity
//   u = momentum * u + gain * gradient
// u is added to the residual in place of the gradient, with `nesterov` gain * gradient + momentum *
// u of the new u. Source: Lin et al. 2018, section 3.1; Sutskever et al. 2013 for Nesterov's.
struct VelocityRule {
  double momentum = 0;  // 0: no velocity, and gain * gradient is added
  double gain = 1;
  bool nesterov = false;

  bool operator==(VelocityRule const&) const = default;
};

enum class Selector : std::uint8_t { fused, accumulated, bucket, block };

// Entries of a block that is selected: such as are whole blocks to aggregators.
inline constexpr std::size_t least_block = 16;
inline constexpr std::size_t most_block = 16384;

struct SelectionRule {
  // The largest entries of each bucket of so many consecutive ones (SparCML section 8); 0: about k
  // of the whole, by a threshold.
  std::size_t bucket = 0;
  // The blocks of so many consecutive entries whose norms are the largest, whole, so that about k
  // entries are sent (Gu et al. 2024, OmNICCL); 0: no blocks. Excludes buckets.
  std::size_t block = 0;
  VelocityRule velocity = {};  // with first_moment: none
  // An entry whose sum was delivered loses its u (factor masking), unless every entry was wanted.
  // Source: Lin et al. 2018, section 3.2.
  bool mask_momentum = true;
  // Entries are chosen by the magnitude of m = first_moment * m + gradient, Adam's first moment but
  // for a factor, in place of that of what is sent; 0: not.
  double first_moment = 0;

  // A buffer as large as the residual goes with it: u or m.
  bool has_moment() const { return velocity.momentum > 0 || first_moment > 0; }
  bool masks() const { return velocity.momentum > 0 && mask_momentum; }
  Selector selector() const;
  // The gradient is added to the residual first, and what is selected is chosen after that: what it
  // is chosen by is no plain sum of gradient and residual.
  bool accumulates() const { return selector() != Selector::fused; }
};

// A way to choose entries. ErrorFeedback has a row of functions for each, DeviceGradient for those
// that devices have.
struct SelectorEntry {
  Selector id;
  std::string_view name;
  bool (*applies)(SelectionRule const& rule);
};

// The first that applies is taken.
inline constexpr SelectorEntry selectors[] = {
    {Selector::bucket, "the largest of each bucket",
     [](SelectionRule const& rule) { return rule.bucket > 0; }},
    {Selector::block, "the norms of blocks",
     [](SelectionRule const& rule) { return rule.block > 0; }},
    {Selector::accumulated, "a threshold of what is accumulated",
     [](SelectionRule const& rule) { return rule.has_moment() || rule.velocity.gain != 1; }},
    {Selector::fused, "a threshold of gradient + residual, in the pass that adds them",
     [](SelectionRule const&) { return true; }},
};

inline SelectorEntry const& find_selector(SelectionRule const& rule) {
  SelectorEntry const* entry = selectors;
  while (!entry->applies(rule)) ++entry;
  return *entry;
}

inline Selector SelectionRule::selector() const { return find_selector(*this).id; }

// The row of that selector in a table whose rows have an `id`; null if there is none.
template <class Row, std::size_t N>
constexpr Row const* find_row(Row const (&rows)[N], Selector id) {
  for (Row const& row : rows) {
    if (row.id == id) return &row;
  }
  return nullptr;
}

}  // namespace sparsecomm
