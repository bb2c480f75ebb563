// Which algorithm suits a set-up: a prediction of the whole step from a few measured figures, and a
// plan that corrects the prediction by what it observes.
//
// Model (SparCML section 5, Ok-Topk section 2): alpha per round of messages that wait for one
// another, an overhead per message, beta per byte received, and rates of what the processor does.
// Every number that a decision rests on is agreed between the ranks beforehand, so that all decide
// alike. All times are in seconds.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/algorithm.h"

namespace sparsecomm {

struct Link {
  double round = 0;    // alpha: latency of a message that is waited for
  double message = 0;  // what each message costs beside it
  double byte = 0;     // beta: while all ranks send at once
};

// Of this machine's processor, while all ranks compute at once; per f32 entry.
struct Rates {
  double check = 0;    // an entry looked at for NaN and Inf
  double exact = 0;    // an entry searched by an exact threshold
  double sample = 0;   // an entry that a sampled threshold looks at
  double pass = 0;     // an entry of the fused selection
  double pack = 0;     // an entry that this selection packs
  double merge = 0;    // a sparse entry encoded, decoded or merged
  double scatter = 0;  // an entry written to, or returned to, a place of its own
  double reduce = 0;   // an entry of a dense block encoded, decoded or added
  // What an entry takes beyond `pass` where a velocity adds up first, and another pass selects.
  double momentum = 0;
};

// To and from aggregators. Zero, where it was not measured: as between ranks.
struct AggregatorFigures {
  double round = 0;  // latency of a message that is waited for
  double byte = 0;   // of Cost::aggregator_load: what links and aggregators take together
};

struct Figures {
  Link link;
  Rates rates;
  AggregatorFigures aggregators = {};

  static constexpr std::size_t count = 14;
  static constexpr std::array<std::string_view, count> names = {
      "round", "message", "byte",    "check",  "exact",    "sample",           "pass",
      "pack",  "merge",   "scatter", "reduce", "momentum", "aggregator_round", "aggregator_byte"};
  std::array<double, count> values() const;
  // Throws InvalidArgument, which names the figure, unless all are finite and none is negative.
  static Figures from_values(std::span<const double> values);
  // Reads saved figures. One that they lack, since a version saved them that did not know it, has
  // its default here: predictions are then those of that version. Throws InvalidArgument as above,
  // and for a name that is not in `names`.
  static Figures from_named(std::map<std::string, double> const& saved);
};

// One step of one group of parameters, or one allreduce of sparse inputs.
struct Workload {
  int ranks = 1;
  std::uint64_t extent = 0;     // N
  std::uint64_t k = 0;          // the largest contribution of any rank
  std::uint64_t union_nnz = 0;  // of all contributions; 0: as if positions were random
  std::size_t element_bytes = 4;
  std::size_t value_bytes = 4;  // of a residual, and of a sparse value
  std::uint64_t run = 1;        // entries of a contribution that lie side by side, as blocks do
  // Where nothing is selected, of a dense vector: blocks of options.block_bytes that hold anything,
  // at most of any rank; 0: as many as entries at random positions reach.
  std::uint64_t blocks = 0;
  bool selects = true;            // selection and error feedback are part of the step
  bool has_moment = false;        // where it selects: a velocity or a first moment goes with it
  bool dense_data = true;         // where nothing is selected: of a dense vector, else of pairs
  bool native_allreduce = false;  // the transport's engine has one
  int aggregators = 0;            // that are left; each has a part of the entries
  bool commits = true;            // it ends a step, so that ranks confirm its result
  AlgorithmOptions options;       // the schedule, and how frames are encoded

  bool meets(Needs needs) const {
    switch (needs) {
      case Needs::nothing:
        return true;
      case Needs::native_allreduce:
        return native_allreduce;
      case Needs::aggregators:
        return aggregators > 0;
    }
    return false;
  }
};

struct Prediction {
  AlgorithmEntry const* algorithm = nullptr;
  // Of one rank's contribution, as the smallest frame has it; null: sent dense.
  IndexCodecEntry const* index_codec = nullptr;
  ValueCodecEntry const* value_codec = nullptr;
  double select = 0;    // check for NaN, threshold, the pass that selects (dense: flushes) or packs
  double latency = 0;   // rounds and messages, as of operation_cost()
  double transfer = 0;  // bytes
  double compute = 0;   // encoding, decoding, merging
  double apply = 0;     // writing the result, returning what was rejected
  double bytes = 0;     // received
  double messages = 0;  // sent

  double exchange() const { return latency + transfer + compute; }
  double total() const { return select + exchange() + apply; }
};

// Entries of the union of `ranks` random selections of k out of `extent`.
std::uint64_t expected_union(std::uint64_t extent, std::uint64_t k, int ranks);

// An operation's messages and bytes, of one rank: the ranks' agreement, whose payload has that
// size, the algorithm and, if it commits, the round after it. The last exchange of a step commits;
// earlier ones, and allreduces that are no part of a step, do not.
Cost operation_cost(AlgorithmEntry const& entry, CostShape const& shape,
                    AlgorithmOptions const& options, std::size_t payload_bytes, bool commits);

Prediction predict(AlgorithmEntry const& entry, Workload const& workload, Figures const& figures);

// The algorithms that `auto` chooses from for gradients: those that deliver everything (dense), the
// exact sum of the selections (lossless), or its k largest entries. Those that round values are
// left to whoever names them.
bool delivers_exact_entries(AlgorithmEntry const& entry);  // on every transport
bool is_candidate(AlgorithmEntry const& entry, Workload const& workload);

// Predictions for all algorithms for which `eligible` holds, the quickest first; ties by the
// table's order.
std::vector<Prediction> rank_algorithms(Workload const& workload, Figures const& figures,
                                        bool (*eligible)(AlgorithmEntry const&, Workload const&));

// What a plan has seen of an algorithm.
struct Experience {
  AlgorithmEntry const* algorithm = nullptr;
  double correction = 1;           // time observed over time predicted, their mean
  std::uint64_t observations = 0;  // 0: none yet
  std::uint64_t last_step = 0;
};

// What a checkpoint must hold for the next decision to be the same.
struct PlanState {
  std::optional<Figures> figures;
  AlgorithmEntry const* algorithm = nullptr;  // of the next step; null: undecided
  std::uint64_t steps_with = 0;               // it has been run since it was chosen
  std::uint64_t observations_before = 0;      // there were of it then
  double union_ratio = 0;  // entries of the union over k, smoothed; 0: not seen yet
  double realised = 1;     // largest selection over k, smoothed
  // Mean square of the logarithm of a step's time over what was expected of it, smoothed.
  double noise = 0.01;
  AlgorithmEntry const* former = nullptr;  // of the last step, where its time is still to come
  double former_predicted = 0;
  std::vector<Experience> experience;
};

struct PlanOptions {
  double hysteresis = 0.03;  // a switch must gain more than this share
  // An algorithm without experience may be so many times quicker than predicted: those that are
  // predicted within that factor of the best are tried.
  double uncertainty = 1.35;
  std::uint64_t trial = 3;    // observations before an algorithm is judged
  std::uint64_t window = 30;  // observations that count, about
  // An algorithm with experience may be so many standard errors of its mean quicker than that.
  double confidence = 2;
  std::uint64_t forget = 2000;    // steps after which an experience is out of date
  double smoothing = 0.2;         // weight of a new observation of anything but times
  double largest_surprise = 1.5;  // an observation counts as no further off than this factor
};

// Chooses the algorithm of every step. Everything handed to it must be the same on all ranks.
class Plan {
 public:
  explicit Plan(PlanOptions options = {}) : options_(options) {}

  PlanState const& state() const { return state_; }
  // Throws InvalidArgument where the state holds a number that none could be.
  void load_state(PlanState state);

  // Of the next step; null while undecided.
  AlgorithmEntry const* algorithm() const { return state_.algorithm; }

  // False while the algorithm in use is being tried.
  bool settled(std::uint64_t step) const {
    return state_.algorithm != nullptr && experience_of(state_.algorithm, step) != nullptr;
  }

  // The first decision. `workload.k` is the k wanted.
  void begin(Figures const& figures, Workload const& workload, std::uint64_t step);
  // Before each step: what the former one took on the slowest rank and the most entries that any
  // rank selected in it; 0 where that is not known, or not typical.
  void observe(double seconds, std::uint64_t most_selected, std::uint64_t k, std::uint64_t step);
  // After each step: decides on the next. `result_nnz` is that of the step; `timed`: its time
  // will say something, since it was an ordinary one.
  void conclude(Workload const& workload, std::uint64_t result_nnz, bool timed, std::uint64_t step);

  // What is known of the workload by now, in place of what was assumed; in steps of 2%, so that
  // what follows from it need not be computed at every step.
  Workload corrected(Workload workload) const;
  // Seconds that the step at hand is expected to take; once there is a decision.
  double expected(Workload const& workload, std::uint64_t step);
  // Seconds that the algorithm may take, given the experience so far: what decisions compare.
  double estimate(Prediction const& prediction, std::uint64_t step) const;

 private:
  // Null where the algorithm is still, or again, to be tried.
  Experience const* experience_of(AlgorithmEntry const* algorithm, std::uint64_t step) const;
  // Whether the algorithm in use is to be run on before there is another decision: until it has
  // been observed twice as often as before, so that noise does not make two that are alike take
  // turns.
  bool stays(std::uint64_t step) const;
  double common_correction(std::uint64_t step) const;
  void decide(Workload const& known, std::uint64_t step);
  // For the candidates, in the table's order. Computed anew where the workload has changed.
  std::span<const Prediction> predictions(Workload const& known);

  PlanOptions options_;
  PlanState state_;
  Workload predicted_;
  std::vector<Prediction> predictions_;
};

}  // namespace sparsecomm
