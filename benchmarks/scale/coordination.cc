// How long simulated ranks take to agree on a step of many groups, over the MPI transport. Rank 0
// prints a JSON object.
//
//   scale_coordination by_name|by_comparison|allreduce GROUPS STEPS
//
// by_name: a round of the coordinator for all groups. by_comparison: the same without what ranks
// remember: an allgather of fingerprints for each group. allreduce: one of 64 bytes, header
// included, to compare with.
// Time is the network's alone: what the processor does takes none.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "agreeing.h"
#include "collectives/figures.h"
#include "simulated_time.h"
#include "transport/mpi/mpi_transport.h"

namespace {

using namespace sparsecomm;

struct Traffic {
  double messages, bytes;
};

Traffic traffic_of(Transport const& transport) {
  Counters const counters = transport.counters();
  return {static_cast<double>(Counters::total(counters.sent_messages)),
          static_cast<double>(Counters::total(counters.sent_bytes))};
}

int run(std::string const& kind, int groups, int steps) {
  auto const transport = make_mpi_transport(MPI_COMM_WORLD, {.poll = false});
  int const ranks = transport->size();
  Agreeing agreeing(ranks, groups);
  CensusAllreduce<std::uint64_t> census;
  std::vector<std::uint64_t> words((64 - header_bytes) / sizeof(std::uint64_t));
  double seconds = 0;
  Traffic before{};
  // The first step, in which all is new, is not measured.
  for (int step = 0; step <= steps; ++step) {
    if (step == 1) before = traffic_of(*transport);
    Channel channel(*transport, static_cast<std::uint32_t>(step),
                    Deadline(steady_clock(), std::chrono::hours(24)));
    double const taken = time_together(MPI_COMM_WORLD, [&] {
      if (kind == "by_name") {
        agreeing.by_name(channel);
      } else if (kind == "by_comparison") {
        agreeing.by_comparison(channel);
      } else {
        census.run(channel, Phase::reduce, std::span(words), std::plus(),
                   [](std::span<const std::uint64_t>, int) {});
      }
    });
    if (step > 0) seconds += taken;
  }
  Traffic const after = traffic_of(*transport);
  double most[] = {(after.messages - before.messages) / steps,
                   (after.bytes - before.bytes) / steps};
  MPI_Allreduce(MPI_IN_PLACE, most, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (transport->rank() == 0) {
    std::printf(
        "{\"kind\": \"%s\", \"ranks\": %d, \"groups\": %d, \"seconds\": %.9g, \"messages\": %.9g, "
        "\"bytes\": %.9g}\n",
        kind.c_str(), ranks, groups, seconds / steps, most[0], most[1]);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  MPI_Init(&count, &arguments);
  std::string const kind = count == 4 ? arguments[1] : "";
  int const groups = count == 4 ? std::atoi(arguments[2]) : 0;
  int const steps = count == 4 ? std::atoi(arguments[3]) : 0;
  bool const known = kind == "by_name" || kind == "by_comparison" || kind == "allreduce";
  int status = 2;
  if (known && groups > 0 && steps > 0) {
    status = run(kind, groups, steps);
  } else {
    std::fprintf(stderr,
                 "usage: scale_coordination by_name|by_comparison|allreduce GROUPS STEPS\n");
  }
  MPI_Finalize();
  return status;
}
