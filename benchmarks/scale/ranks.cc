// What the simulated ranks run: one allreduce of algorithms() over the MPI transport, after they
// have agreed on it, without the communicator's thread, for ranks are threads of one process here.
// Rank 0 prints a JSON object.
//
//   scale_ranks ALGORITHM NUMEL DENSITY STEPS MAX_BYTES [AGGREGATORS [RUN]]
//
// The last AGGREGATORS of the processes (none) aggregate for the others, which are the ranks.
// Selected entries come in runs of RUN (1), which begin at multiples of it.
// Time is the network's alone: what the processor does takes none. Where the ranks would take more
// than MAX_BYTES of memory in all, nothing is run, and the object holds the formulas alone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "aggregation.h"
#include "agreeing.h"
#include "collectives/algorithm.h"
#include "ina/client.h"
#include "simulated_time.h"
#include "transport/mpi/mpi_transport.h"
#include "transport/wrapped.h"

namespace {

using namespace sparsecomm;

// Of each rank's selection, at the same places on all ranks (measured on VGG16: 0.1 to 0.3).
constexpr double shared = 0.3;

// splitmix64: the same numbers everywhere, and none depend on the order of ranks.
std::uint64_t random_bits(std::uint64_t seed) {
  seed += 0x9e3779b97f4a7c15u;
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
  return seed ^ (seed >> 31);
}

struct Selection {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  // One run in each of k / run ranges that are as even as can be.
  Selection(std::uint64_t numel, std::uint64_t k, std::uint64_t run, int rank, std::uint64_t step) {
    std::uint64_t const places = numel / run;
    std::uint64_t const runs = k / run;
    for (std::uint64_t i = 0; i < runs; ++i) {
      bool const common = static_cast<double>(random_bits(i) >> 11) * 0x1p-53 < shared;
      std::uint64_t const who = common ? 0 : static_cast<std::uint64_t>(rank) + 1;
      std::uint64_t bits = random_bits((step << 52) ^ (who << 36) ^ i);
      std::uint64_t const first = i * places / runs;
      std::uint64_t const last = (i + 1) * places / runs;
      std::uint64_t const place = first + bits % (last - first);
      for (std::uint64_t j = 0; j < run; ++j, bits = random_bits(bits)) {
        indices.push_back(static_cast<std::uint32_t>(place * run + j));
        values.push_back(std::ldexp(static_cast<float>((bits >> 40) + 1), -24) *
                         ((bits >> 39) % 2 == 0 ? 1.0f : -1.0f));
      }
    }
  }
};

struct Run {
  std::uint64_t numel, k;
  int steps;
  AlgorithmOptions options;
  std::uint64_t run = 1;  // entries
  int aggregators = 0;

  Selection selection(int rank, int step) const {
    return {numel, k, run, rank, static_cast<std::uint64_t>(step)};
  }
};

// What a rank counted: bytes are received ones, messages sent ones.
struct Counted {
  double entries = 0;  // bytes of indices and values of the gradient
  double headers = 0;
  double figures = 0;  // the other bytes: sizes, histograms
  double bytes = 0;
  double messages = 0;

  friend Counted operator-(Counted const& a, Counted const& b) {
    return {a.entries - b.entries, a.headers - b.headers, a.figures - b.figures, a.bytes - b.bytes,
            a.messages - b.messages};
  }
};

// Tells apart what arrives, by the headers of its frames. Those of figures are frames of bytes or
// of integers, which no gradient here is made of.
class Simulated {
 public:
  // `ranks`: without the aggregators.
  Simulated(MPI_Comm ranks, int aggregators)
      : ranks_(ranks),
        transport_(make_mpi_transport(ranks, {.poll = false}), [this](FrameHeader const& header) {
          bool const entries = header.kind != FrameKind::bytes && header.dtype == DType::f32;
          (entries ? counted_.entries : counted_.figures) +=
              static_cast<double>(header.index_bytes) + header.value_bytes;
          counted_.headers += header_bytes;
        }) {
    if (aggregators == 0) return;
    link_ = std::make_shared<MpiAggregatorLink>(MPI_COMM_WORLD, transport_.size());
    // One to each of many keeps the link full; with more, SimGrid takes hours.
    int const streams = aggregators > 16 ? 1 : InaClient::default_streams;
    client_ = std::make_unique<InaClient>(link_, transport_.rank(), streams);
  }
  ~Simulated() {
    if (link_) link_->end();
  }
  Simulated(Simulated const&) = delete;
  Simulated& operator=(Simulated const&) = delete;

  MPI_Comm ranks() const { return ranks_; }
  Transport& transport() { return transport_; }
  Services services() { return {.native = nullptr, .aggregators = client_.get()}; }
  // Messages are those between ranks.
  Counted counted() const {
    Counted all = counted_;
    all.bytes = static_cast<double>(Counters::total(transport_.counters().received_bytes));
    all.messages = static_cast<double>(Counters::total(transport_.counters().sent_messages));
    if (!client_) return all;
    auto const received = static_cast<double>(client_->received_bytes());
    all.bytes += received;
    all.headers += link_->header_bytes();
    all.figures += link_->number_bytes();
    all.entries += received - link_->header_bytes() - link_->number_bytes();
    return all;
  }

 private:
  MPI_Comm ranks_;
  Counted counted_;
  FrameObserver transport_;
  std::shared_ptr<MpiAggregatorLink> link_;
  std::unique_ptr<InaClient> client_;
};

struct Measured {
  double seconds = 0;  // of all ranks together, over all measured steps
  Counted counted;     // of this rank
};

template <class F>
Measured measure(Simulated& simulated, int steps, F&& step) {
  // The first step finds thresholds and regions that later ones use.
  step(0);
  Counted const before = simulated.counted();
  Measured measured;
  for (int i = 1; i <= steps; ++i) {
    measured.seconds += time_together(simulated.ranks(), [&] { step(i); });
  }
  measured.counted = simulated.counted() - before;
  return measured;
}

Measured run_sparse(Simulated& simulated, AlgorithmEntry const& entry, Run const& run) {
  auto const allreduce = make_sparse_allreduce<float>(entry, run.options, {});
  Agreeing agreeing(simulated.transport().size(), 1);
  return measure(simulated, run.steps, [&](int step) {
    Selection const selection = run.selection(simulated.transport().rank(), step);
    Channel channel(simulated.transport(), static_cast<std::uint32_t>(step),
                    Deadline(steady_clock(), std::chrono::hours(24)));
    agreeing.by_name(channel);
    allreduce->run(channel, {selection.indices, selection.values},
                   {run.numel, run.k, run.k, static_cast<std::uint64_t>(step)});
  });
}

Measured run_dense(Simulated& simulated, AlgorithmEntry const& entry, Run const& run) {
  auto const allreduce = entry.dense->make<float>(run.options, simulated.services());
  std::vector<float> data(run.numel);
  Agreeing agreeing(simulated.transport().size(), 1);
  return measure(simulated, run.steps, [&](int step) {
    Selection const selection = run.selection(simulated.transport().rank(), step);
    std::ranges::fill(data, 0.0f);
    for (std::size_t i = 0; i < selection.indices.size(); ++i) {
      data[selection.indices[i]] = selection.values[i];
    }
    Channel channel(simulated.transport(), static_cast<std::uint32_t>(step),
                    Deadline(steady_clock(), std::chrono::hours(24)));
    agreeing.by_name(channel);
    allreduce->run(channel, data, Reduction::sum, 1.0f);
    allreduce->write(data);
  });
}

void print_shape(AlgorithmEntry const& entry, Run const& run, int ranks, Cost const& cost,
                 double memory) {
  std::printf(
      "{\"algorithm\": \"%s\", \"ranks\": %d, \"numel\": %llu, \"k\": %llu, "
      "\"memory_bytes\": %.9g, \"formula_words\": %.9g, \"formula_messages\": %.9g",
      std::string(entry.name).c_str(), ranks, static_cast<unsigned long long>(run.numel),
      static_cast<unsigned long long>(run.k), memory, (cost.bytes + cost.aggregator_bytes) / 4,
      cost.messages);
}

// Rank 0 prints the figures of all, per step.
void print(Measured const& own, Run const& run, Simulated& simulated) {
  Transport const& transport = simulated.transport();
  Counted const& counted = own.counted;
  double most[] = {counted.bytes, counted.messages};
  double sums[] = {counted.bytes, counted.entries, counted.headers, counted.figures,
                   counted.messages};
  MPI_Allreduce(MPI_IN_PLACE, most, 2, MPI_DOUBLE, MPI_MAX, simulated.ranks());
  MPI_Allreduce(MPI_IN_PLACE, sums, 5, MPI_DOUBLE, MPI_SUM, simulated.ranks());
  if (transport.rank() != 0) return;
  double const steps = run.steps;
  double const shares = steps * transport.size();
  std::printf(
      ", \"seconds\": %.9g, \"words_max\": %.9g, \"words_mean\": %.9g, \"entry_words\": %.9g, "
      "\"header_words\": %.9g, \"figure_words\": %.9g, \"messages_max\": %.9g, "
      "\"messages_mean\": %.9g",
      own.seconds / steps, most[0] / steps / 4, sums[0] / shares / 4, sums[1] / shares / 4,
      sums[2] / shares / 4, sums[3] / shares / 4, most[1] / steps, sums[4] / shares);
}

void run_rank(AlgorithmEntry const& entry, Run const& run, MPI_Comm comm, double most_memory) {
  Simulated simulated(comm, run.aggregators);
  Transport const& transport = simulated.transport();
  int const ranks = transport.size();
  Cost const cost = entry.cost({.ranks = ranks,
                                .extent = run.numel,
                                .k = run.k,
                                .aggregators = std::max(1, run.aggregators)},
                               run.options) +
                    agreement_cost(ranks, 0);
  // What arrives, and a vector or two of all elements.
  double const memory =
      ranks * (cost.bytes + cost.aggregator_bytes + 8.0 * static_cast<double>(run.numel));
  if (transport.rank() == 0) print_shape(entry, run, ranks, cost, memory);
  if (memory <= most_memory) {
    print(entry.sparse ? run_sparse(simulated, entry, run) : run_dense(simulated, entry, run), run,
          simulated);
  }
  if (transport.rank() == 0) std::printf("}\n");
  std::fflush(stdout);
}

int run_one(int count, char** arguments) {
  int processes = 0, number = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  MPI_Comm_rank(MPI_COMM_WORLD, &number);
  int const aggregators = count > 6 ? std::atoi(arguments[6]) : 0;
  auto const length = count > 7 ? std::strtoull(arguments[7], nullptr, 10) : 1;
  if (count < 6 || count > 8 || aggregators < 0 || aggregators >= processes || length < 1) {
    std::fprintf(stderr,
                 "usage: scale_ranks ALGORITHM NUMEL DENSITY STEPS MAX_BYTES [AGGREGATORS [RUN]]; "
                 "fewer aggregators than processes\n");
    return 2;
  }
  int const workers = processes - aggregators;
  bool const aggregates = number >= workers;
  MPI_Comm comm;
  MPI_Comm_split(MPI_COMM_WORLD, aggregates ? 1 : 0, number, &comm);
  if (aggregates) {
    MpiAggregator(MPI_COMM_WORLD, workers).run();
  } else {
    Run run{std::strtoull(arguments[2], nullptr, 10),
            0,
            std::atoi(arguments[4]),
            {},
            length,
            aggregators};
    run.k = static_cast<std::uint64_t>(std::atof(arguments[3]) * static_cast<double>(run.numel));
    run.k -= run.k % length;
    // Words as the formulas count them: an index and a value for each entry.
    run.options.frame.index_codec = IndexCodecChoice::raw32;
    run_rank(find_algorithm(arguments[1]), run, comm, std::atof(arguments[5]));
  }
  MPI_Comm_free(&comm);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  int const status = run_one(count, arguments);
  MPI_Finalize();
  return status;
}
