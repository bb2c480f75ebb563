// Gradient clipping before accumulation.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <map>

namespace sparsecomm {

// Scales the gradients of one step down, in place, to a norm of at most `most` over all of them, as
// torch.nn.utils.clip_grad_norm_ does with gradients that have been divided by the loss scale;
// where the norm is not finite, all entries become NaN. They are taken in the order of the keys, so
// that rounding does not depend on how DDP laid out its buckets. On a device nothing waits. Source:
// Lin et al. 2018, section 3.2.
void clip_gradients(std::map<std::size_t, at::Tensor> const& gradients, double most,
                    double loss_scale);

}  // namespace sparsecomm
