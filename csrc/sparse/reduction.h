// How values that meet at an index are combined. An index that a rank does not hold takes no part:
// it stands for the neutral element (SparCML section 5.1).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace sparsecomm {

enum class Reduction : std::uint8_t { sum, product, min, max };

struct ReductionEntry {
  Reduction id;
  std::string_view name;
};

inline constexpr ReductionEntry reduction_table[] = {
    {Reduction::sum, "sum"},
    {Reduction::product, "product"},
    {Reduction::min, "min"},
    {Reduction::max, "max"},
};

constexpr std::span<const ReductionEntry> reductions() { return reduction_table; }
constexpr std::string_view name(Reduction reduction) {
  return reduction_table[static_cast<std::size_t>(reduction)].name;
}

// Integers wrap around, as they do in torch; NaN wins over numbers in min and max, as it does
// there.
template <Reduction R, class V>
struct Combine {
  static constexpr V neutral() {
    using Limits = std::numeric_limits<V>;
    if constexpr (R == Reduction::sum) return V{0};
    if constexpr (R == Reduction::product) return V{1};
    if constexpr (R == Reduction::min) {
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    }
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  }
  V operator()(V a, V b) const {
    if constexpr (R == Reduction::min) return a != a || a < b ? a : b;
    if constexpr (R == Reduction::max) return a != a || a > b ? a : b;
    if constexpr (std::is_integral_v<V>) {
      using U = std::make_unsigned_t<V>;
      if constexpr (R == Reduction::sum)
        return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
      if constexpr (R == Reduction::product) {
        return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
      }
    } else {
      if constexpr (R == Reduction::sum) return a + b;
      if constexpr (R == Reduction::product) return a * b;
    }
  }
};

// Calls f(Combine<R, V>{}) for the reduction R that `reduction` names.
template <class V, class F>
decltype(auto) visit_reduction(Reduction reduction, F&& f) {
  switch (reduction) {
    case Reduction::sum:
      return f(Combine<Reduction::sum, V>{});
    case Reduction::product:
      return f(Combine<Reduction::product, V>{});
    case Reduction::min:
      return f(Combine<Reduction::min, V>{});
    case Reduction::max:
      return f(Combine<Reduction::max, V>{});
  }
  throw InvalidArgument(concat("reduction code ", int(reduction), " is unknown"));
}

template <class V>
V neutral(Reduction reduction) {
  return visit_reduction<V>(reduction, [](auto combine) { return combine.neutral(); });
}

}  // namespace sparsecomm
