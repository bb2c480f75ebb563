// The state behind a DDP communication hook, in C++; the Python states are thin wrappers of it.
#pragma once

#include <ATen/core/ivalue.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "delivered_gradient.h"
#include "engine/grouping_trial.h"
#include "parameter_group.h"

namespace sparsecomm {

class CollectivePool;

// What a checkpoint holds of one rank.
struct HookCheckpoint {
  struct Group {
    std::vector<std::string> parameters;
    ExchangeState state;
  };
  // In the order of the parameters' entries; else in that of their memory then, 1-D.
  bool row_major = true;
  std::map<std::string, at::Tensor> residuals;  // by parameter
  std::map<std::string, at::Tensor> moments;    // likewise; empty where the rule has none
  std::vector<Group> groups;
  double loss_scale = 1;                  // the unit of the tensors and thresholds
  std::optional<GroupingTimes> grouping;  // of a trial that has come to a decision

  void follow(double other_scale);
};

// Which parameters are exchanged together, of those with the same dtype, density and velocity's
// rule.
enum class GroupsBy : std::uint8_t {
  arrival,   // that a bucket of the step in which they first come brings together
  number,    // of the same number, see set_groups(); formed when the step's last bucket has come
  bucket,    // of the same bucket, of each step: what is kept of them moves along
  measured,  // all of them, or those of the same bucket, as a GroupingTrial decides
};

struct HookOptions {
  ExchangeOptions exchange;
  // Parameters with fewer dimensions are sent whole, in groups of their own; 0: none.
  int dense_below = 0;
  // Before it is added to the residual, a rank's gradient is scaled down to this norm / sqrt(P); 0:
  // not. The norm is that of all parameters, so no exchange starts before the last bucket.
  double clip_norm = 0;
  // Not of a dense exchange, which keeps nothing, and whose groups are the buckets.
  GroupsBy groups_by = GroupsBy::arrival;
};

// Gradients that are exchanged as soon as they are all there: DDP's bucket, or anybody else's.
struct Bucket {
  std::size_t index = 0;  // its place in the step: 0 begins one
  bool last = false;      // of the step
  at::Tensor buffer;
  // As many of both; a gradient is of the parameter's shape, or contiguous with as many entries. A
  // buffer that is sparse is the only gradient.
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  // Which gradients are zero since this rank has not used the parameter: where no rank has, the
  // result is dropped, and so the residual must stay. Empty: none.
  std::vector<bool> unused = {};
  // Where the averages are wanted, in another layout or memory perhaps; empty: in the gradients.
  std::vector<at::Tensor> results = {};
  // Zeros that DDP hands over for a rank that is out of data: what is kept here goes on to be
  // delivered, in whatever unit the other ranks' gradients have.
  bool joined = false;
  // The gradients are what the parameters' grads hold, which become the results: what a former
  // exchange has left there is not sent again.
  bool of_grads = false;
  // The gradients are of a further backward pass before an optimizer's step. Of grads this is
  // known.
  bool continues = false;
};

struct GroupStats {
  std::string name;
  std::size_t parameters = 0;
  std::size_t numel = 0;
  StepRecord last;
  Duration exposed{};  // see HookStats
};

struct HookStats {
  ExchangeStats exchange;  // summed over groups; steps: of the group that has made most
  Counters counters;       // of the communicator
  // What steps took after their last bucket had come, until all groups were done.
  Duration exposed{};
  std::vector<GroupStats> groups;                // of the last step
  std::vector<AggregatorLoss> lost_aggregators;  // by the communicator
  std::optional<GroupingTrial> grouping;         // where there is one
};

// Thread-safe: a call waits for one on another thread to return, and one from a callback or a
// signal's handler in the middle of another on the same thread throws InvalidArgument. Steps follow
// one another, whichever threads run them.
class HookState : public std::enable_shared_from_this<HookState> {
 public:
  // `cuda_library`: the file that a gradient on a CUDA device needs.
  static std::shared_ptr<HookState> make(HookOptions options,
                                         CommunicatorOptions communicator_options,
                                         std::string cuda_library);
  ~HookState();

  // Before the first run(). The names become the keys of the checkpoint; without them keys count up
  // in the order in which the first step brings the parameters.
  void name_parameters(std::vector<std::pair<std::string, at::Tensor>> const& parameters);
  // Before the first run(): densities of their own, which later set_density() leaves alone. At 1 a
  // parameter is sent whole by a dense algorithm.
  void set_densities(std::vector<std::pair<at::Tensor, double>> const& densities);
  // Before the first run(): of GroupsBy::number. Parameters without a number are one more group.
  void set_groups(std::vector<std::pair<at::Tensor, int>> const& numbers);
  // What the loss is multiplied by, asked for once a step, before its first bucket; 1 without. The
  // same on all ranks, but for those that have joined, which are not asked.
  void follow_loss_scale(std::function<double()> loss_scale);
  void connect(std::unique_ptr<Transport> transport, TimelineOptions timeline);
  // Goes on with other ranks after a failure, which all of them call for at the same step; the
  // residuals stay. What a step that was broken off had delivered goes back into them first.
  void reconnect(std::unique_ptr<Transport> transport, TimelineOptions timeline);
  bool connected() const;
  // Empty until connected.
  std::weak_ptr<Communicator const> communicator() const;
  // Null until connected.
  std::optional<int> rank() const;
  // True when all of the last step was delivered, so that its results may be used.
  bool delivered() const;
  // Completes the buckets of a step that wait for others, as they are: the caller drops the step,
  // and waits for what it has begun.
  void release_waiting();
  // Of the communicator, once connected.
  void request();
  bool take_requested();
  // Ends the progress thread, which may hold Python objects, and with it all exchanges. Python's
  // garbage collector may call it on that thread: then another one does it, and later.
  void close();

  // Exchanges the bucket in place, and completes the future with `value`: the bucket's buffer as
  // whoever waits for it wants it, of type `type`. Throws InvalidArgument on buckets that cannot be
  // exchanged, and fails those of the step that wait for it; what fails later completes the future
  // with the error.
  c10::intrusive_ptr<c10::ivalue::Future> run(Bucket const& bucket, c10::IValue value,
                                              c10::TypePtr type);

  // More parameters, with their names, in an optimizer that has made steps. Such as have a density
  // of their own are in `densities` too.
  void add_parameters(std::vector<std::pair<std::string, at::Tensor>> const& parameters,
                      std::vector<std::pair<at::Tensor, double>> const& densities);
  // parameter += factor * gradient, where the last step brought entries of the gradient, or
  // `everywhere`; gradients are those that were exchanged, with the strides of their parameters.
  void add_received(std::vector<at::Tensor> const& parameters,
                    std::vector<at::Tensor> const& gradients, double factor, bool everywhere);

  void set_density(double density);
  // Of parameters, each with momentum, gain and nesterov of its VelocityRule; the others keep what
  // they have, at first the state's options. Before the first step, whose groups are of parameters
  // with the same rule, or between steps: then the numbers may change, alike for all parameters of
  // a group, but not whether there is a velocity, nor Nesterov's. Ranks must do so alike.
  void set_momenta(std::vector<std::tuple<at::Tensor, double, double, bool>> const& entries);
  // Replaces the velocities of parameters that have one: of a parameter's shape and its residual's
  // dtype, in units of gradients of a loss that is not scaled. Before the first step or between
  // steps; a checkpoint that is loaded later replaces them.
  void set_moments(std::vector<std::pair<at::Tensor, at::Tensor>> const& velocities);
  HookStats stats() const;
  // Of each group's next step.
  std::vector<std::string> algorithms() const;

  // Both throw InvalidArgument while a step is being exchanged. A checkpoint loaded before the
  // first step is applied as parameters appear, and what fits none of them is an error at the end
  // of that step.
  HookCheckpoint checkpoint() const;
  void load(HookCheckpoint checkpoint);

 private:
  struct Place {
    ParameterGroup* group;
    std::size_t member;
    std::size_t order;  // among all parameters
    std::shared_ptr<DeliveredGradient> delivered = nullptr;
  };
  // Of a parameter between two groups.
  struct FormerPlace {
    std::string key;
    std::size_t order;
    std::shared_ptr<DeliveredGradient> delivered;
  };
  struct PendingBucket;
  struct Step;
  class GroupingAgreement;
  // Held by each public function.
  class Entry {
   public:
    explicit Entry(HookState const& state);
    ~Entry();
    Entry(Entry const&) = delete;
    Entry& operator=(Entry const&) = delete;

   private:
    HookState const& state_;
  };

  HookState(HookOptions options, CommunicatorOptions communicator_options,
            std::string cuda_library);
  // Replaces what parameters have of their own, of which there is no group yet.
  template <class Value>
  void set_before_first_step(char const* what,
                             std::vector<std::pair<at::Tensor, Value>> const& values,
                             std::unordered_map<void const*, Value>& by_parameter);
  void form_groups(std::vector<Bucket const*> const& buckets);
  void drop_empty_groups();
  void dissolve_unlike_groups(std::vector<at::Tensor> const& parameters);
  void dissolve(ParameterGroup& group);
  bool must_wait(Bucket const& bucket) const;
  void share_density() const;
  void follow_trial();
  void observe_step();
  void submit_agreement();
  void load_grouping(std::optional<GroupingTimes> const& decision);
  std::optional<GroupingTimes> decision() const;
  void adopt_plan(ParameterGroup& group) const;
  std::vector<bool> take_fresh(Bucket const& bucket, PendingBucket& pending);
  std::vector<at::Tensor> arrange(Bucket const& bucket, PendingBucket& pending);
  void add_group(at::ScalarType dtype, std::optional<double> density, VelocityRule const& velocity,
                 std::vector<ParameterGroup::Member> members,
                 std::vector<at::Tensor> const& parameters);
  std::optional<double> density_of(at::Tensor const& parameter) const;
  int group_number_of(at::Tensor const& parameter) const;
  VelocityRule velocity_of(void const* parameter) const;
  ExchangeOptions options_at(std::optional<double> density, VelocityRule const& velocity) const;
  ExchangeOptions options_of(at::Tensor const& parameter) const;
  void check_velocities() const;
  void put_moment(at::Tensor const& velocity, ParameterGroup const& group,
                  ParameterGroup::Member const& member) const;
  void copy_moments_to(ParameterGroup const& group) const;
  void add_moments_to_come(HookCheckpoint& checkpoint) const;
  c10::intrusive_ptr<c10::ivalue::Future> take(Bucket const& bucket, c10::IValue value,
                                               c10::TypePtr type, double loss_scale);
  void accept(Bucket const& bucket, std::shared_ptr<PendingBucket> const& pending);
  void fail_waiting(std::exception_ptr const& error);
  void drop_waiting();
  void begin_step(double loss_scale);
  void break_off_step() const;
  void take_back_broken_step(char const* before_what) const;
  double ask_loss_scale() const;
  double kept_loss_scale() const;
  void submit(std::vector<ParameterGroup*> const& groups, bool last_bucket,
              std::shared_ptr<PendingBucket> const& ends_with_step);
  void submit_groups(std::vector<ParameterGroup*> const& groups, std::size_t& left);
  void submit_sparse();
  void submit_end_of_step(std::shared_ptr<Step> const& step, Communicator& communicator);
  void submit_groupless(std::shared_ptr<Operation> operation,
                        std::shared_ptr<PendingBucket> const& pending,
                        std::function<bool()> const& usable);
  std::size_t order_of_sparse(at::Tensor const& parameter);
  void require_of_model(at::Tensor const& parameter) const;
  bool is_group(std::vector<at::Tensor> const& parameters) const;
  void settle_device(Bucket const& bucket);
  std::string key_of(at::Tensor const& parameter);
  void check_loaded(ParameterGroup const& group) const;
  void check_loaded(std::string const& key, Layout const& layout, at::ScalarType dtype,
                    bool keeps_moment) const;
  void check_loaded_names() const;
  std::set<std::string> keys_of_groups() const;
  void check_all_loaded() const;
  void settle_loaded();
  void add_unseen(HookCheckpoint& checkpoint) const;
  void restore(ParameterGroup& group);
  bool restore_dissolved(ParameterGroup& group);
  void copy_kept(HookCheckpoint const& from, ParameterGroup const& group) const;
  void settle_dissolved();
  bool has_made_no_step() const { return places_.empty() && former_places_.empty(); }
  static void keep(ParameterGroup const& group, HookCheckpoint& checkpoint);
  static void add_rest(HookCheckpoint rest, HookCheckpoint& checkpoint);
  Counters counters() const;
  bool busy() const;
  void require_open() const;
  void require_idle(char const* what) const;

  // Nobody who holds the interpreter waits for it, since who has it may want the interpreter.
  mutable std::mutex mutex_;  // guards what follows
  mutable std::atomic<std::thread::id> holder_;
  pid_t owner_ = ::getpid();
  HookOptions options_;
  // A dense exchange keeps nothing from step to step, so each bucket is a group, at any time.
  bool by_bucket_;
  GroupsBy groups_by_;                  // of the next step, never `measured`
  std::optional<GroupingTrial> trial_;  // where it is `measured`, and there is a choice
  std::shared_ptr<GroupingAgreement const> agreement_;  // of the last step, if it had one
  std::vector<HookCheckpoint::Group> tried_;            // whose plans groups like them adopt
  CommunicatorOptions communicator_options_;
  std::string cuda_library_;
  std::optional<at::Device> device_;                    // of all gradients; the first bucket's
  std::unique_ptr<SideStream> side_;                    // of a device that is not the processor
  std::unordered_map<void const*, std::string> names_;  // by TensorImpl
  std::unordered_map<void const*, double> densities_;   // likewise
  std::unordered_map<void const*, int> group_numbers_;  // likewise
  std::unordered_map<void const*, VelocityRule> velocities_;  // likewise
  std::unordered_map<void const*, VelocityRule>
      changed_velocities_;                               // of a change, until it is one
  std::unordered_map<void const*, at::Tensor> moments_;  // of set_moments(), until a group has them
  std::unordered_map<void const*, Place> places_;
  std::unordered_map<void const*, FormerPlace> former_places_;  // of parameters that have none
  std::vector<at::Tensor> parameters_;                          // keeps the TensorImpls above alive
  std::size_t unnamed_ = 0;
  std::uint64_t last_buckets_ = 0;  // that have come: steps
  bool closed_ = false;
  bool sealed_ = false;                      // the first step is over: the model is known
  std::optional<HookCheckpoint> loaded_;     // of parameters that have not come yet
  std::optional<HookCheckpoint> dissolved_;  // what groups that are no more have kept, until others
                                             // have their parameters
  std::unordered_map<ParameterGroup*, std::vector<std::shared_ptr<PendingBucket>>> waiting_;
  // Of this step, whose parameters have no group before its last bucket has come.
  std::deque<std::pair<Bucket, std::shared_ptr<PendingBucket>>> unformed_;
  std::shared_ptr<Step> step_;
  std::vector<std::unique_ptr<ParameterGroup>> groups_;
  mutable std::vector<SharingGroup> sharing_;  // those without a density of their own, meanwhile
  std::size_t groups_formed_ = 0;
  ExchangeStats left_;                                               // of groups that are no more
  Duration exposed_{};                                               // of former steps
  std::unordered_map<ParameterGroup const*, double> own_densities_;  // of groups that have one
  std::shared_ptr<std::function<double()> const> current_loss_scale_;
  // Of a step whose gradients are clipped: what has come, by Place::order, and what is complete.
  std::map<std::size_t, at::Tensor> gradients_;
  std::vector<ParameterGroup*> held_;
  // Gradients that are sparse themselves are averaged as they are, and nothing of them is kept.
  std::vector<std::pair<at::Tensor, std::shared_ptr<PendingBucket>>> held_sparse_;
  std::atomic<std::size_t> groupless_in_flight_ = 0;            // operations
  std::unordered_map<void const*, std::size_t> sparse_orders_;  // like Place::order
  std::shared_ptr<CollectivePool> sparse_pool_;                 // of communicator_
  Counters former_counters_;                                    // before the last reconnect()
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace sparsecomm
