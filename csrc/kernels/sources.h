// Where a kernel's entries come from, and what it leaves in their place.
#pragma once

#include <cstddef>
#include <span>

#include "base/error.h"
#include "kernels/kernels.h"
#include "kernels/magnitude.h"

namespace sparsecomm {

inline void require_same_size(std::size_t gradient, std::size_t residual) {
  require(gradient == residual, "a gradient of ", gradient,
          " entries needs a residual of as many, not of ", residual);
}

// The sources of a selection: value(i) is what is offered, settle(i, ...) what happens to it then,
// once. After settle(i, value, false), settled(i) is the value, take(i) makes it taken,
// give_back(i, value) undoes that, and mask(i), where masks(), is for what stays taken.
template <class T>
struct FusedSource {
  using V = accumulate_t<T>;

  T* gradient;
  V* residual;

  V value(std::size_t i) const { return residual[i] + widen(gradient[i]); }
  void settle(std::size_t i, V value, bool taken) const {
    residual[i] = taken ? V{0} : value;
    gradient[i] = T{};
  }
  V settled(std::size_t i) const { return residual[i]; }
  void take(std::size_t i) const { residual[i] = 0; }
  void give_back(std::size_t i, V value) const { residual[i] = value; }
  static constexpr bool masks() { return false; }
  void mask(std::size_t) const {}
};

template <class T>
struct ScaledSource : FusedSource<T> {
  using typename FusedSource<T>::V;

  V scale;

  V value(std::size_t i) const { return this->residual[i] + scale * widen(this->gradient[i]); }
};

template <class T>
struct MomentumSource : FusedSource<T> {
  using typename FusedSource<T>::V;

  V scale;
  V* momentum;
  V factor;
  bool mask_momentum;
  bool nesterov;

  V next_momentum(std::size_t i) const {
    return factor * momentum[i] + scale * widen(this->gradient[i]);
  }
  V step(std::size_t i) const {
    V const u = next_momentum(i);
    return nesterov ? scale * widen(this->gradient[i]) + factor * u : u;
  }
  V value(std::size_t i) const { return this->residual[i] + step(i); }
  void settle(std::size_t i, V value, bool taken) const {
    momentum[i] = taken && mask_momentum ? V{0} : next_momentum(i);
    FusedSource<T>::settle(i, value, taken);
  }
  bool masks() const { return mask_momentum; }
  void mask(std::size_t i) const { momentum[i] = 0; }
};

// The sum of a gradient and a residual, read only.
template <class T>
struct SumSource {
  using V = accumulate_t<T>;

  T const* gradient;
  V const* residual;

  V value(std::size_t i) const { return residual[i] + widen(gradient[i]); }
};

template <class T>
struct ReadOnly {
  using V = accumulate_t<T>;

  T const* x;

  V value(std::size_t i) const { return widen(x[i]); }
  void settle(std::size_t, V, bool) const {}
  V settled(std::size_t i) const { return value(i); }
  void take(std::size_t) const {}
  void give_back(std::size_t, V) const {}
  static constexpr bool masks() { return false; }
  void mask(std::size_t) const {}
};

inline void require_same_momentum(std::size_t gradient, std::size_t momentum) {
  require(gradient == momentum, "a gradient of ", gradient,
          " entries needs a momentum of as many, not of ", momentum);
}

// Calls f(source) with the source of these arguments.
template <class T, class F>
void visit_source(FusedArguments<T> const& arguments, F&& f) {
  require_same_size(arguments.gradient.size(), arguments.residual.size());
  FusedSource<T> const plain{arguments.gradient.data(), arguments.residual.data()};
  if (!arguments.momentum.empty()) {
    require_same_momentum(arguments.gradient.size(), arguments.momentum.size());
    f(MomentumSource<T>{plain, arguments.scale, arguments.momentum.data(), arguments.factor,
                        arguments.mask_momentum, arguments.nesterov});
  } else if (arguments.scale == 1) {
    f(plain);
  } else {
    f(ScaledSource<T>{plain, arguments.scale});
  }
}

// The same for what is only read: gradient + residual, or the gradient where there is no residual.
template <class T, class F>
decltype(auto) visit_sum(std::span<const T> gradient, std::span<const accumulate_t<T>> residual,
                         F&& f) {
  if (residual.empty()) return f(ReadOnly<T>{gradient.data()});
  require_same_size(gradient.size(), residual.size());
  return f(SumSource<T>{gradient.data(), residual.data()});
}

}  // namespace sparsecomm
