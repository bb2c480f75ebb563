// Parameters whose gradients are exchanged together, with their residuals.
//
// DDP rebuilds its buckets after the first iteration, and a run that is resumed starts with the
// initial ones again, but what is selected must not depend on that, unless the caller wants groups
// to be buckets. So a group waits until the buckets of a step have brought all of its parameters.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/gradient_exchange.h"
#include "layout.h"
#include "profiler_labels.h"
#include "side_stream.h"
#include "wire/checksum.h"

namespace sparsecomm {

class ParameterGroup {
 public:
  struct Member {
    std::string key;         // names the parameter in checkpoints
    std::size_t offset = 0;  // in the group
    std::size_t numel = 0;
    Layout layout = {};               // of the gradient, and so of what is kept
    void const* parameter = nullptr;  // as whoever makes the group knows it
  };

  // Throws InvalidArgument for a dtype that is not f32, f64, f16 or bf16. `name`: ranks compare it.
  // `operation`: the exchange's name, by which ranks find what to compare, see
  // Communicator::submit(). `keeps_residual`: false for a dense exchange that no plan chose.
  // `side`: of the device that holds gradients and residuals, null for the processor's memory; it
  // outlives the group.
  static std::unique_ptr<ParameterGroup> make(std::string const& name, std::string operation,
                                              at::ScalarType dtype, std::vector<Member> members,
                                              ExchangeOptions const& options,
                                              Communicator& communicator, bool keeps_residual,
                                              SideStream const* side = nullptr);
  virtual ~ParameterGroup() = default;

  std::string const& name() const { return name_; }
  std::size_t numel() const { return numel_; }
  std::vector<Member> const& members() const { return members_; }
  at::ScalarType dtype() const { return dtype_; }
  // All members' residuals, 1-D, float32 (float64 for float64 gradients), in member order; empty
  // where none is kept.
  at::Tensor const& residual() const { return residual_; }
  // A view of the parameter's shape and layout.
  at::Tensor residual_of(Member const& member) const;
  // The rule's u or m of a member, as its residual; undefined where the rule has none.
  at::Tensor moment_of(Member const& member) const;
  bool has_moment() const { return moment_.defined(); }
  // The parameter lies in memory in another way, and so will its gradients: what is kept of them
  // moves along. Where members differ between ranks, the exchange is a mismatch.
  void lay_out(std::size_t member, at::Tensor const& parameter);
  // Brings what is kept into the unit of another loss scale.
  virtual void follow(double loss_scale) = 0;

  // Goes on with other ranks, at the same step and with the same residual.
  virtual void require_possible(Communicator const& communicator) const = 0;
  void reconnect(Communicator& communicator);

  // A member's gradient for this step: its numel elements start at `data`. True when it was the
  // last one. `unused`: it is zero since this rank has not used the parameter, and where no rank
  // has, DDP drops the result; so the member's residual and moment take no part.
  bool arrive(Member const& member, void* data, bool unused = false);
  // Says that what arrives is of a further backward pass of the step before: moments do not decay,
  // and only what is new in them is added to the residual.
  void continue_step() { continues_ = true; }
  // Notes a former result that a member's gradient came with and that is not sent again. Every rank
  // adds its own to what the exchange brings, so they must be the same.
  void hold_former(at::Tensor const& former);
  // Forgets what has arrived in a step that was broken off.
  void discard_arrivals();
  // `failed`: the exchange did, as on all ranks. `usable`: nothing else did on this one.
  using End = std::function<void(bool failed, bool usable)>;
  // Starts the exchange of a complete group. On the progress thread `end` runs before the group is
  // idle, and then `done`, with the first error; `end` may throw. `awaited`: until what has arrived
  // is there. `batch`, `loss_scale`: see GradientExchange::bind().
  void submit(Awaited awaited, End end, Communicator::Completion done, Batch const& batch,
              double loss_scale);
  // Exchanges in this thread where nothing else is going on; blocks.
  void run(Batch const& batch);
  bool busy() const { return busy_; }
  // Of the last step: how long after its last bucket had come the group was done. Set before it is
  // idle.
  void set_exposed(Duration time) { exposed_ = time; }
  Duration exposed() const { return exposed_; }

  // See GradientExchange.
  virtual bool delivered() const = 0;
  virtual bool ended_batch() const = 0;
  virtual std::optional<std::span<const std::uint32_t>> received() const = 0;
  // `failed`: another part of the step did, so that it has not been made; else it stays counted.
  void withdraw(bool failed);
  virtual ExchangeState const& state() const = 0;
  virtual void load_state(ExchangeState const& state) = 0;
  virtual ExchangeStats const& stats() const = 0;
  // Of the parameters in this group and the groups that they were in before.
  std::uint64_t steps() const { return steps_before_ + stats().steps; }
  void set_steps_before(std::uint64_t steps) { steps_before_ = steps; }
  virtual StepRecord const& last_step() const = 0;
  virtual void set_density(double density) = 0;
  virtual void set_share(DensityShare const& share) = 0;
  // Of the next step, which a share is of.
  virtual double density_of_all() const = 0;
  VelocityRule velocity() const { return rule_.velocity; }
  // Between steps; see GradientExchange.
  void set_velocity(VelocityRule const& rule);
  virtual std::string_view algorithm() const = 0;
  virtual bool settled() const = 0;

 protected:
  struct Arrival {
    std::size_t offset;
    std::byte* data;
    std::size_t numel;
    bool unused;
  };

  ParameterGroup(std::string name, std::string operation, at::ScalarType dtype,
                 std::vector<Member> members, Communicator& communicator, bool keeps_residual,
                 SelectionRule const& rule, SideStream const* side);
  // Of members that are not row-major: the order of their dimensions.
  std::string layout_text() const;
  // Arrivals that have entries, in offset order, neighbours in memory joined.
  std::vector<Arrival> take_arrivals();
  virtual bool accumulated() const = 0;
  virtual void withdraw_exchange(bool failed) = 0;
  virtual void residual_changed() = 0;
  virtual void set_layout(std::string text) = 0;
  virtual void set_velocity_of_exchange(VelocityRule const& rule) = 0;
  virtual void set_former(std::uint64_t checksum) = 0;
  virtual void reconnect_exchange(Communicator& communicator) = 0;
  virtual std::shared_ptr<Operation> bind(Awaited awaited, Batch const& batch,
                                          double loss_scale) = 0;
  void rescale(double ratio);

  std::string name_, operation_;
  at::ScalarType dtype_;
  std::vector<Member> members_;
  Communicator* communicator_;
  std::size_t numel_ = 0;
  at::Tensor residual_;
  at::Tensor moment_;  // of the same size; undefined without
  ProfilerLabels labels_;

 private:
  void require_idle() const;
  void withhold(Arrival const& arrival);
  void continue_moments();
  double decay() const {
    return rule_.velocity.momentum > 0 ? rule_.velocity.momentum : rule_.first_moment;
  }
  // How much of the moment is in what the rule adds to the residual.
  double share_of_moment() const {
    if (rule_.velocity.nesterov) return rule_.velocity.momentum;
    return rule_.velocity.momentum > 0 ? 1 : 0;
  }
  void give_back();

  SelectionRule rule_;
  bool continues_ = false;
  std::optional<Checksum> former_;
  bool continued_ = false;  // the moments are prepared for that
  SideStream const* side_;
  // Of an exchange with unused members: their parts of residual_ and moment_, zero meanwhile, and
  // what belongs there; it may yet be withdrawn.
  std::vector<std::pair<at::Tensor, at::Tensor>> withheld_;
  std::vector<std::pair<at::Tensor, at::Tensor>> given_back_;
  std::vector<Arrival> arrivals_;
  std::size_t arrived_ = 0;
  std::atomic<bool> busy_ = false;
  std::uint64_t steps_before_ = 0;
  Duration exposed_{};
};

}  // namespace sparsecomm
