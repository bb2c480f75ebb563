#include "engine/sparse_collectives.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "collectives/patterns.h"
#include "engine/link_model.h"
#include "kernels/block_scan.h"

namespace sparsecomm {
namespace {

constexpr std::uint64_t largest_payload = std::numeric_limits<std::uint32_t>::max();

template <class T>
std::string describe(char const* operation, CollectiveConfig const& config) {
  require(config.extent < largest_payload, operation, ": a vector of ", config.extent,
          " entries exceeds 2^32 - 2; split it");
  require(!config.average || (config.reduction == Reduction::sum && !std::is_integral_v<T>),
          operation, ": the average of ", name(dtype_of<T>()), " is not defined; use sum");
  return concat("operation=", operation, ";numel=", config.extent, ";dtype=", name(dtype_of<T>()),
                ";", config.vector);
}

std::string describe_reduction(CollectiveConfig const& config) {
  return concat(";reduction=", config.average ? "avg" : name(config.reduction));
}

// All ranks throw alike, before any entry travels.
void check_message(std::uint64_t bytes, std::uint64_t entries) {
  require<Mismatch>(bytes <= largest_payload, "a message with up to ", entries,
                    " entries may take ", bytes, " bytes, it can hold ", largest_payload,
                    "; send less at a time");
}

// An engine may lose a NaN in min and max; whoever names its allreduce gets what torch gives.
bool may_reduce_natively(Services const& services, Reduction reduction) {
  bool const orders = reduction == Reduction::min || reduction == Reduction::max;
  return services.native != nullptr && !orders;
}

// Of a stream in which at most `entries` came together, sent as pairs or, beyond delta, dense.
template <class V>
std::uint64_t stream_bytes(std::uint64_t entries, std::uint64_t extent) {
  std::uint64_t const limit = default_delta<V>(extent);
  return std::max<std::uint64_t>(max_sparse_frame_bytes<V>(std::min(entries, limit), extent),
                                 entries > limit ? header_bytes + extent * sizeof(V) : 0);
}

// Whether an entry of a dense vector takes no part.
template <class T>
struct IsNeutral {
  T neutral;

  bool operator()(T x) const {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
      return x.bits == neutral.bits || ((x.bits | neutral.bits) & 0x7fffu) == 0;
    } else {
      return x == neutral;
    }
  }
};

template <class T>
IsNeutral<T> is_neutral(Reduction reduction) {
  return {static_cast<T>(neutral<accumulate_t<T>>(reduction))};
}

}  // namespace

bool can_reduce(AlgorithmEntry const& entry) { return !entry.sparse || entry.lossless(); }

AlgorithmEntry const* find_reducing(std::string_view name) {
  if (name == "auto") return nullptr;
  std::string able = "auto";
  bool known = false;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (can_reduce(entry)) able += concat(", ", entry.name);
    if (entry.name != name) continue;
    if (can_reduce(entry)) return &entry;
    known = true;
  }
  throw InvalidArgument(concat("algorithm '", name, known ? "' is not exact" : "' is unknown",
                               "; choose one of ", able));
}

template <class T>
AllreduceOperation<T>::AllreduceOperation(Communicator& communicator,
                                          AlgorithmOptions const& options)
    : communicator_(communicator),
      options_(options),
      sparse_(algorithms().size()),
      dense_(algorithms().size()),
      wide_dense_(algorithms().size()) {}

template <class T>
void AllreduceOperation<T>::configure(CollectiveConfig config) {
  if (config.algorithm != nullptr) {
    find_reducing(config.algorithm->name);
  }
  std::string text =
      describe<T>("allreduce", config) + describe_reduction(config) +
      concat(";algorithm=", config.algorithm == nullptr ? "auto" : config.algorithm->name,
             ";block_bytes=", options_.block_bytes);
  if (config.in_rank_order) text += ";in_rank_order=1";
  CombineOrder const order = config.in_rank_order ? CombineOrder::rank : CombineOrder::arrival;
  if (order != options_.combine_order) {
    options_.combine_order = order;
    for (auto& made : dense_) made.reset();
    for (auto& made : wide_dense_) made.reset();
  }
  sparse_text_ = text + ";form=sparse";
  dense_text_ = text + ";form=dense";
  config_ = std::move(config);
}

template <class T>
void AllreduceOperation<T>::bind(SparseView<V> contribution) {
  is_dense_ = false;
  contribution_ = contribution;
}

template <class T>
void AllreduceOperation<T>::bind(std::span<T> data) {
  require(data.size() == config_.extent, "allreduce: ", data.size(), " entries are bound, ",
          config_.extent, " were configured");
  is_dense_ = true;
  data_ = data;
}

template <class T>
Proposal AllreduceOperation<T>::prepare() {
  std::uint64_t entries = is_dense_ ? data_.size() : contribution_.nnz();
  if (is_dense_ && (config_.algorithm == nullptr || config_.algorithm->sparse)) {
    entries -=
        static_cast<std::uint64_t>(std::ranges::count_if(data_, is_neutral<T>(config_.reduction)));
  }
  bool const planned = is_dense_ && config_.algorithm == nullptr && !data_.empty();
  bool const by_blocks = planned && config_.reduction == Reduction::sum &&
                         communicator_.services().aggregators_left() > 0;
  entries_ = EntryCounts(entries, by_blocks ? count_blocks() : 0);
  return {.text = is_dense_ ? dense_text_ : sparse_text_, .payload = payload_of(entries_)};
}

// At least 1. Halves go through aggregators as floats, of which fewer fit into a block.
template <class T>
std::uint64_t AllreduceOperation<T>::count_blocks() {
  auto const bytes = std::as_bytes(data_);
  std::size_t const block = options_.block_bytes / sizeof(V) * sizeof(T);
  bitmap_.resize(part_count(part_count(bytes.size(), block), 64));
  std::size_t const found = block_kernels().nonzero_blocks(bytes, block, bitmap_);
  return std::max<std::size_t>(1, found);
}

template <class T>
void AllreduceOperation<T>::run(Channel& channel, Agreement const& agreement) {
  auto const counts = read_payload<EntryCounts>(agreement.payload);
  AlgorithmEntry const& entry =
      config_.algorithm != nullptr ? *config_.algorithm : choose(channel, counts);
  if (entry.sparse) {
    reduce_sparse(channel, counts.most, entry);
  } else {
    reduce_dense(channel, entry);
  }
}

// By numbers that all ranks have agreed on, so that all choose alike.
template <class T>
AlgorithmEntry const& AllreduceOperation<T>::choose(Channel& channel, EntryCounts const& counts) {
  auto const typical = [&](std::uint64_t entries) {
    return std::min(typical_entries(entries), config_.extent);
  };
  ChoiceProblem const problem{
      .extent = config_.extent,
      .most_entries = typical(counts.most),
      .average_entries = typical(counts.total / static_cast<std::uint64_t>(channel.size())),
      .most_blocks = typical(counts.most_blocks),
      .reduction = config_.reduction,
      .dense_data = is_dense_,
      .aggregators = communicator_.services().aggregators_left()};
  return choices_.find(problem, [&] {
    auto const eligible = [](AlgorithmEntry const& entry, Workload const& given) {
      return can_reduce(entry) && given.meets(entry.needs);
    };
    return rank_algorithms(workload(channel, problem), communicator_.figures(channel), eligible)
        .front()
        .algorithm;
  });
}

template <class T>
Workload AllreduceOperation<T>::workload(Channel const& channel,
                                         ChoiceProblem const& problem) const {
  Workload workload{
      .ranks = channel.size(),
      .extent = problem.extent,
      .k = std::max<std::uint64_t>(problem.most_entries, 1),
      .element_bytes = problem.dense_data ? sizeof(T) : sizeof(V),
      .value_bytes = sizeof(V),
      .blocks = problem.most_blocks,
      .selects = false,
      .dense_data = problem.dense_data,
      .native_allreduce = may_reduce_natively(communicator_.services(), problem.reduction),
      .aggregators = problem.aggregators,
      .commits = false,
      .options = options_};
  workload.union_nnz =
      std::max(workload.k,
               expected_union(problem.extent, std::max<std::uint64_t>(problem.average_entries, 1),
                              workload.ranks));
  workload.options.frame.allow_dense &= problem.reduction == Reduction::sum;
  return workload;
}

template <class T>
void AllreduceOperation<T>::reduce_sparse(Channel& channel, std::uint64_t most,
                                          AlgorithmEntry const& entry) {
  std::uint64_t const together = most * static_cast<std::uint64_t>(channel.size());
  check_message(std::max<std::uint64_t>(max_sparse_frame_bytes<V>(most, config_.extent),
                                        stream_bytes<V>(together, config_.extent)),
                together);
  auto& algorithm = sparse_[static_cast<std::size_t>(&entry - algorithms().data())];
  if (!algorithm) algorithm = make_sparse_allreduce<V>(entry, options_, communicator_.services());
  result_ = algorithm
                ->run(channel, is_dense_ ? compress() : contribution_,
                      {config_.extent, most, most, 0, config_.reduction})
                .reduced;
  if (is_dense_) expand(channel.size());
}

template <class T>
void AllreduceOperation<T>::reduce_dense(Channel& channel, AlgorithmEntry const& entry) {
  std::string const reason = communicator_.missing(entry);
  require<Mismatch>(reason.empty(), reason);
  auto const line = static_cast<std::size_t>(&entry - algorithms().data());
  std::uint64_t const entries = entry.dense->largest_message(config_.extent, channel.size());
  check_message(header_bytes + entries * sizeof(V), entries);
  if (is_dense_ && (std::is_same_v<T, V> || entry.dense->rounds_once)) {
    if (!dense_[line]) dense_[line] = entry.dense->make<T>(options_, communicator_.services());
    dense_[line]->run(channel, data_, config_.reduction,
                      config_.average ? static_cast<V>(channel.size()) : V{1});
    dense_[line]->write(data_);
    return;
  }
  expanded_.resize(config_.extent);
  if (is_dense_) {
    std::ranges::transform(data_, expanded_.begin(), [](T x) { return static_cast<V>(x); });
  } else {
    std::ranges::fill(expanded_, neutral<V>(config_.reduction));
    for (std::size_t i = 0; i < contribution_.nnz(); ++i) {
      expanded_[contribution_.indices[i]] = contribution_.values[i];
    }
  }
  if (!wide_dense_[line])
    wide_dense_[line] = entry.dense->make<V>(options_, communicator_.services());
  wide_dense_[line]->run(channel, expanded_, config_.reduction, V{1});
  wide_dense_[line]->write(expanded_);
  result_ = {.dense = expanded_, .is_dense = true};
  if (is_dense_) expand(channel.size());
}

// The entries that are not neutral, packed without a branch.
template <class T>
SparseView<typename AllreduceOperation<T>::V> AllreduceOperation<T>::compress() {
  std::size_t const entries = entries_.most;
  indices_.resize(entries + 1);  // a neutral one behind the last is written, but not counted
  values_.resize(entries + 1);
  auto const absent = is_neutral<T>(config_.reduction);
  std::size_t k = 0;
  for (std::size_t i = 0; i < data_.size(); ++i) {
    std::size_t const place = std::min(k, entries);
    indices_[place] = static_cast<std::uint32_t>(i);
    values_[place] = static_cast<V>(data_[i]);
    k += !absent(data_[i]);
  }
  require(k == entries, "allreduce: a vector of ", entries, " entries has ", k,
          " by now; leave it alone until the operation has ended");
  return SparseView<V>{indices_, values_}.slice(0, entries);
}

// Writes the result into the dense vector.
template <class T>
void AllreduceOperation<T>::expand(int ranks) {
  V const divisor = config_.average ? static_cast<V>(ranks) : V{1};
  auto const finish = [&](V x) { return static_cast<T>(config_.average ? x / divisor : x); };
  if (result_.is_dense) {
    std::ranges::transform(result_.dense, data_.begin(), finish);
    return;
  }
  std::ranges::fill(data_, static_cast<T>(neutral<V>(config_.reduction)));
  for (std::size_t i = 0; i < result_.nnz(); ++i) {
    data_[result_.sparse.indices[i]] = finish(result_.sparse.values[i]);
  }
}

template class AllreduceOperation<float>;
template class AllreduceOperation<double>;
template class AllreduceOperation<Half>;
template class AllreduceOperation<BFloat16>;
template class AllreduceOperation<std::int32_t>;
template class AllreduceOperation<std::int64_t>;

template <class V>
void AllgatherOperation<V>::configure(CollectiveConfig config) {
  text_ = describe<V>("allgather of sparse vectors", config);
  config_ = std::move(config);
}

template <class V>
void AllgatherOperation<V>::run(Channel& channel, Agreement const& agreement) {
  std::uint64_t const most = read_payload<EntryCounts>(agreement.payload).most;
  check_message(max_sparse_frame_bytes<V>(most, config_.extent), most);
  result_ = gather_.run(channel, contribution_, config_.extent, most);
}

template <class V>
void ReduceScatterOperation<V>::configure(CollectiveConfig config, int ranks,
                                          std::span<const std::uint32_t> boundaries) {
  require(boundaries.empty() || boundaries.size() + 1 == static_cast<std::size_t>(ranks),
          "reduce-scatter: ", boundaries.size(), " boundaries do not make ", ranks, " regions");
  require(boundaries.empty() ||
              (std::ranges::is_sorted(boundaries) && boundaries.back() <= config.extent),
          "reduce-scatter: the boundaries are no ascending split of ", config.extent, " entries");
  text_ = describe<V>("reduce-scatter of sparse vectors", config) + describe_reduction(config);
  even_regions(config.extent, ranks, regions_);
  for (std::size_t i = 0; i < boundaries.size(); ++i) {
    regions_[i].last = regions_[i + 1].first = boundaries[i];
    text_ += concat(i == 0 ? ";boundaries=" : ",", boundaries[i]);
  }
  config_ = std::move(config);
}

template <class V>
void ReduceScatterOperation<V>::run(Channel& channel, Agreement const& agreement) {
  std::uint64_t const most = read_payload<EntryCounts>(agreement.payload).most;
  check_message(stream_bytes<V>(most, config_.extent), most);
  result_ =
      reduce_
          .run(channel, contribution_, regions_, {config_.extent, most, most, 0, config_.reduction})
          .sparse();
}

#define SPARSECOMM_OPERATIONS(V)        \
  template class AllgatherOperation<V>; \
  template class ReduceScatterOperation<V>;
SPARSECOMM_OPERATIONS(float)
SPARSECOMM_OPERATIONS(double)
SPARSECOMM_OPERATIONS(std::int32_t)
SPARSECOMM_OPERATIONS(std::int64_t)
#undef SPARSECOMM_OPERATIONS

}  // namespace sparsecomm
