// The figures of one communicator's transport and processor, and the operation that asks for them.
#pragma once

#include <memory>

#include "engine/calibration.h"
#include "engine/communicator.h"
#include "engine/planner.h"

namespace sparsecomm {

class LinkModel {
 public:
  // `known`: those to return; null: they are measured, within `timeout`.
  LinkModel(Clock const& clock, Duration timeout, std::shared_ptr<Figures const> known)
      : clock_(clock), timeout_(timeout), figures_(std::move(known)) {}

  // For an operation that runs, on all ranks alike. Measures when first called, see calibrate(),
  // for which the operation gets more time.
  Figures const& figures(Channel& channel, Services const& services);
  // Null until they are measured: the same on all ranks.
  Figures const* known() const { return figures_.get(); }

 private:
  Clock const& clock_;
  Duration timeout_;
  std::shared_ptr<Figures const> figures_;
  CalibrationBuffers buffers_;
};

// Measures the communicator's figures, where no operation has needed them yet.
class Calibration final : public Operation {
 public:
  explicit Calibration(Communicator& communicator) : communicator_(communicator) {}
  Proposal prepare() override { return {.text = "operation=calibration"}; }
  void run(Channel& channel, Agreement const& /*agreement*/) override {
    figures_ = communicator_.figures(channel);
  }
  Figures const& figures() const { return figures_; }  // once it has ended

 private:
  Communicator& communicator_;
  Figures figures_;
};

}  // namespace sparsecomm
