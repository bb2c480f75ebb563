#include "clip_gradients.h"

#include <c10/core/GradMode.h>

#include <optional>
#include <vector>

namespace sparsecomm {

void clip_gradients(std::map<std::size_t, at::Tensor> const& gradients, double most,
                    double loss_scale) {
  if (gradients.empty()) return;
  c10::NoGradGuard const no_grad;
  std::vector<at::Tensor> norms;
  for (auto const& [order, gradient] : gradients) {
    auto const dtype = gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    norms.push_back(at::linalg_vector_norm(gradient, 2, std::nullopt, false, dtype));
  }
  at::Tensor const norm = at::linalg_vector_norm(at::stack(norms), 2).div(loss_scale);
  // An infinite norm less itself is NaN, any other 0.
  at::Tensor const factor = (norm + 1e-6).reciprocal().mul(most).clamp_max(1).add(norm - norm);
  if (factor.is_cpu() && factor.item<double>() == 1) return;
  for (auto const& [order, gradient] : gradients) gradient.mul_(factor);
}

}  // namespace sparsecomm
