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
std::string describe(std::string_view operation, CollectiveConfig const& config) {
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

bool orders(Reduction reduction) {
  return reduction == Reduction::min || reduction == Reduction::max;
}

// An engine may lose a NaN in min and max; whoever names its allreduce gets what torch gives.
bool may_reduce_natively(Services const& services, Reduction reduction) {
  return services.native != nullptr && !orders(reduction);
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

std::size_t line_of(AlgorithmEntry const& entry) {
  return static_cast<std::size_t>(&entry - algorithms().data());
}

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
      describe<T>(allreduce_name, config) + describe_reduction(config) +
      concat(";algorithm=", config.algorithm == nullptr ? "auto" : config.algorithm->name,
             ";block_bytes=", options_.block_bytes, ";fusion_bytes=", communicator_.fusion_bytes());
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
Fusible::Terms AllreduceOperation<T>::terms_of(AlgorithmEntry const& entry,
                                               EntryCounts const& counts) const {
  std::uint64_t const entries = entry.sparse ? counts.most : config_.extent;
  std::size_t const each = sizeof(V) + (entry.sparse ? sizeof(std::uint32_t) : 0);
  return {.algorithm = &entry,
          .dtype = dtype_of<V>(),
          .reduction = config_.reduction,
          .extent = config_.extent,
          .entries = entries,
          .bytes = entries * each};
}

template <class T>
Fusible* AllreduceOperation<T>::fusible(std::span<const std::byte> payload) {
  if (communicator_.size() == 1) return nullptr;
  AlgorithmEntry const* entry = config_.algorithm;
  auto const counts = read_payload<EntryCounts>(payload);
  if (entry == nullptr) {
    Figures const* const figures = communicator_.known_figures();
    if (figures == nullptr) return nullptr;
    entry = &choose(*figures, counts);
  }
  // Of two zeros that differ in their sign, which one is the larger depends on the place.
  if (!entry->fusible || (!entry->sparse && orders(config_.reduction))) return nullptr;
  terms_ = terms_of(*entry, counts);
  return this;
}

template <class T>
void AllreduceOperation<T>::run(Channel& channel, Agreement const& agreement) {
  if (!agreement.fused.empty()) exchange_together(channel, agreement.fused);
  if (!std::exchange(is_taken_, false)) {
    auto const counts = read_payload<EntryCounts>(agreement.payload);
    AlgorithmEntry const& entry = config_.algorithm != nullptr
                                      ? *config_.algorithm
                                      : choose(communicator_.figures(channel), counts);
    terms_ = terms_of(entry, counts);
    if (entry.sparse) {
      result_ = reduce_sparse(channel, terms_, contribution());
    } else if (is_dense_ && (std::is_same_v<T, V> || entry.dense->rounds_once)) {
      return reduce_in_place(channel, terms_);
    } else {
      expanded_.resize(config_.extent);
      write_contribution(expanded_);
      result_ = reduce_dense(channel, terms_, expanded_);
    }
  }
  if (is_dense_) expand();
}

// Of the same type, each with its indices behind those of the ones before it.
template <class T>
void AllreduceOperation<T>::exchange_together(Channel& channel, std::span<Fusible* const> all) {
  Fusible::Terms whole = terms_;
  whole.extent = whole.entries = 0;
  bool const sparse = whole.algorithm->sparse;
  gathered_.clear();
  for (Fusible* const each : all) {
    auto& member = static_cast<FusibleAllreduce<V>&>(*each);
    if (sparse) {
      std::size_t const before = gathered_.indices.size();
      gathered_.append(member.contribution());
      for (std::uint32_t& index : std::span(gathered_.indices).subspan(before)) {
        index += static_cast<std::uint32_t>(whole.extent);
      }
    } else {
      gathered_.values.resize(whole.extent + each->terms().extent);
      member.write_contribution(std::span(gathered_.values).subspan(whole.extent));
    }
    whole.extent += each->terms().extent;
    whole.entries += each->terms().entries;
  }
  StreamView<V> const result = sparse ? reduce_sparse(channel, whole, gathered_.view())
                                      : reduce_dense(channel, whole, gathered_.values);
  std::uint64_t first = 0;
  for (Fusible* const each : all) {
    static_cast<FusibleAllreduce<V>&>(*each).take(result, first);
    first += each->terms().extent;
  }
}

template <class T>
void AllreduceOperation<T>::take(StreamView<V> const& whole, std::uint64_t first) {
  if (whole.is_dense) {
    auto const own = whole.dense.subspan(first, config_.extent);
    expanded_.assign(own.begin(), own.end());
    result_ = {.dense = expanded_, .is_dense = true};
  } else {
    pairs_.assign(whole.sparse.range(first, first + config_.extent));
    for (std::uint32_t& index : pairs_.indices) index -= static_cast<std::uint32_t>(first);
    result_ = {.sparse = pairs_.view()};
  }
  is_taken_ = true;
}

// By numbers that all ranks have agreed on, so that all choose alike.
template <class T>
AlgorithmEntry const& AllreduceOperation<T>::choose(Figures const& figures,
                                                    EntryCounts const& counts) {
  auto const typical = [&](std::uint64_t entries) {
    return std::min(typical_entries(entries), config_.extent);
  };
  ChoiceProblem const problem{
      .extent = config_.extent,
      .most_entries = typical(counts.most),
      .average_entries = typical(counts.total / static_cast<std::uint64_t>(communicator_.size())),
      .most_blocks = typical(counts.most_blocks),
      .reduction = config_.reduction,
      .dense_data = is_dense_,
      .aggregators = communicator_.services().aggregators_left()};
  return choices_.find(problem, [&] {
    auto const eligible = [](AlgorithmEntry const& entry, Workload const& given) {
      return can_reduce(entry) && given.meets(entry.needs);
    };
    return rank_algorithms(workload(problem), figures, eligible).front().algorithm;
  });
}

template <class T>
Workload AllreduceOperation<T>::workload(ChoiceProblem const& problem) const {
  Workload workload{
      .ranks = communicator_.size(),
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
StreamView<accumulate_t<T>> AllreduceOperation<T>::reduce_sparse(Channel& channel,
                                                                 Fusible::Terms const& terms,
                                                                 SparseView<V> contribution) {
  std::uint64_t const together = terms.entries * static_cast<std::uint64_t>(channel.size());
  check_message(std::max<std::uint64_t>(max_sparse_frame_bytes<V>(terms.entries, terms.extent),
                                        stream_bytes<V>(together, terms.extent)),
                together);
  auto& algorithm = sparse_[line_of(*terms.algorithm)];
  if (!algorithm) {
    algorithm = make_sparse_allreduce<V>(*terms.algorithm, options_, communicator_.services());
  }
  SparseProblem const problem{terms.extent, terms.entries, terms.entries, 0, terms.reduction};
  return algorithm->run(channel, contribution, problem).reduced;
}

template <class T>
StreamView<accumulate_t<T>> AllreduceOperation<T>::reduce_dense(Channel& channel,
                                                                Fusible::Terms const& terms,
                                                                std::span<V> data) {
  check_dense(terms);
  auto& algorithm = wide_dense_[line_of(*terms.algorithm)];
  if (!algorithm) {
    algorithm = terms.algorithm->dense->template make<V>(options_, communicator_.services());
  }
  algorithm->run(channel, data, terms.reduction, V{1});
  algorithm->write(data);
  return {.dense = data, .is_dense = true};
}

template <class T>
void AllreduceOperation<T>::reduce_in_place(Channel& channel, Fusible::Terms const& terms) {
  check_dense(terms);
  auto& algorithm = dense_[line_of(*terms.algorithm)];
  if (!algorithm) {
    algorithm = terms.algorithm->dense->template make<T>(options_, communicator_.services());
  }
  algorithm->run(channel, data_, terms.reduction, divisor());
  algorithm->write(data_);
}

template <class T>
void AllreduceOperation<T>::check_dense(Fusible::Terms const& terms) const {
  std::string const reason = communicator_.missing(*terms.algorithm);
  require<Mismatch>(reason.empty(), reason);
  std::uint64_t const entries =
      terms.algorithm->dense->largest_message(terms.extent, communicator_.size());
  check_message(header_bytes + entries * sizeof(V), entries);
}

template <class T>
void AllreduceOperation<T>::write_contribution(std::span<V> out) {
  if (is_dense_) {
    std::ranges::transform(data_, out.begin(), [](T x) { return static_cast<V>(x); });
    return;
  }
  std::ranges::fill(out, neutral<V>(config_.reduction));
  for (std::size_t i = 0; i < contribution_.nnz(); ++i) {
    out[contribution_.indices[i]] = contribution_.values[i];
  }
}

// The entries that are not neutral, packed without a branch.
template <class T>
SparseView<typename AllreduceOperation<T>::V> AllreduceOperation<T>::compress() {
  std::size_t const entries = entries_.most;
  pairs_.resize(entries + 1);  // a neutral one behind the last is written, but not counted
  auto const absent = is_neutral<T>(config_.reduction);
  std::size_t k = 0;
  for (std::size_t i = 0; i < data_.size(); ++i) {
    std::size_t const place = std::min(k, entries);
    pairs_.indices[place] = static_cast<std::uint32_t>(i);
    pairs_.values[place] = static_cast<V>(data_[i]);
    k += !absent(data_[i]);
  }
  require(k == entries, "allreduce: a vector (", config_.vector, ") of ", entries, " entries has ",
          k, " by now; leave it alone until the operation has ended");
  return pairs_.view().slice(0, entries);
}

// Writes the result into the dense vector.
template <class T>
void AllreduceOperation<T>::expand() {
  auto const finish = [average = config_.average, divisor = divisor()](V x) {
    return static_cast<T>(average ? x / divisor : x);
  };
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
  text_ = describe<V>(allgather_name, config);
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
  text_ = describe<V>(reduce_scatter_name, config) + describe_reduction(config);
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
