#include "engine/link_model.h"

namespace sparsecomm {

Figures const& LinkModel::figures(Channel& channel, Services const& services) {
  if (!figures_) {
    TimePoint const start = clock_.now();
    Channel measuring = channel.under(Deadline(clock_, timeout_));
    measuring.postpone(calibration_allowance);
    figures_ = std::make_shared<Figures const>(calibrate(measuring, clock_, buffers_, services));
    buffers_ = {};
    channel.postpone(clock_.now() - start);
  }
  return *figures_;
}

}  // namespace sparsecomm
