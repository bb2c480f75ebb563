#include "collectives/figures.h"

namespace sparsecomm {

Cost census_cost(int ranks, double bytes) {
  auto const rounds = static_cast<double>(bruck_rounds(ranks));
  return {.rounds = rounds,
          .messages = rounds,
          .bytes = rounds * (header_bytes + bytes),
          .exact = true};
}

Cost packed_allgather_cost(int ranks, double bytes) {
  auto const rounds = static_cast<double>(bruck_rounds(ranks));
  return {.rounds = rounds,
          .messages = rounds,
          .bytes = rounds * header_bytes + (ranks - 1) * bytes,
          .exact = true};
}

}  // namespace sparsecomm
