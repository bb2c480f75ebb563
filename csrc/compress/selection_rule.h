// What a rank selects of its gradient beside a share of it by magnitude.
#pragma once

#include <cstddef>

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

struct SelectionRule {
  // The largest entries of each bucket of so many consecutive ones (SparCML section 8); 0: about k
  // of the whole, by a threshold.
  std::size_t bucket = 0;
  // See VelocityRule. With the mask, an entry whose sum was delivered loses its u (factor masking),
  // unless every entry was wanted. Source: Lin et al. 2018, section 3.2.
  double momentum = 0;
  bool mask_momentum = true;
  // Entries are chosen by the magnitude of m = first_moment * m + gradient, Adam's first moment but
  // for a factor, in place of that of what is sent; 0: not.
  double first_moment = 0;
  double gain = 1;  // see VelocityRule; with first_moment: 1
  bool nesterov = false;

  VelocityRule velocity() const { return {momentum, gain, nesterov}; }
  void set_velocity(VelocityRule const& rule) {
    momentum = rule.momentum;
    gain = rule.gain;
    nesterov = rule.nesterov;
  }
  // A buffer as large as the residual goes with it: u or m.
  bool has_moment() const { return momentum > 0 || first_moment > 0; }
  // The gradient is added to the residual first, and what is selected is chosen after that: what it
  // is chosen by is no plain sum of gradient and residual.
  bool accumulates() const { return bucket > 0 || has_moment() || gain != 1; }
};

}  // namespace sparsecomm
