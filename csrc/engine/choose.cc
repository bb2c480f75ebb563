#include "engine/choose.h"

#include <string>

namespace sparsecomm {
namespace {

constexpr double seconds_per_round = 20e-6;
constexpr double seconds_per_byte = 1e-9;
constexpr double seconds_per_entry = 2e-9;

bool is_integral(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }
bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

double seconds(AlgorithmEntry const& entry, ReductionShape const& shape) {
  CostShape cost_shape{.ranks = shape.ranks,
                       .extent = shape.extent,
                       .k = entry.sparse ? shape.most_entries : shape.extent,
                       .value_bytes = entry.sparse && is_half(shape.dtype)
                                          ? sizeof(float)
                                          : static_cast<double>(size_of(shape.dtype))};
  Cost const cost = entry.cost(cost_shape, {});
  return cost.rounds * seconds_per_round + cost.bytes * seconds_per_byte +
         cost.entries * seconds_per_entry;
}

}  // namespace

bool can_reduce(AlgorithmEntry const& entry, DType dtype, Reduction reduction) {
  if (entry.sparse) return entry.lossless();
  return reduction == Reduction::sum && !is_integral(dtype);
}

AlgorithmEntry const* find_reducing(std::string_view name, DType dtype, Reduction reduction) {
  if (name == "auto") return nullptr;
  std::string able = "auto";
  bool known = false;
  for (AlgorithmEntry const& entry : algorithms()) {
    bool const can = can_reduce(entry, dtype, reduction);
    if (can) able += concat(", ", entry.name);
    if (entry.name != name) continue;
    if (can) return &entry;
    known = true;
  }
  std::string const reason = known ? concat("does not give the exact ", sparsecomm::name(reduction),
                                            " of ", sparsecomm::name(dtype))
                                   : "is unknown";
  throw InvalidArgument(concat("algorithm '", name, "' ", reason, "; choose one of ", able));
}

AlgorithmEntry const& choose(ReductionShape const& shape) {
  AlgorithmEntry const* best = nullptr;
  double least = 0;
  for (AlgorithmEntry const& entry : algorithms()) {
    if (!can_reduce(entry, shape.dtype, shape.reduction)) continue;
    double const time = seconds(entry, shape);
    if (best == nullptr || time < least) {
      best = &entry;
      least = time;
    }
  }
  return *best;  // there is always a lossless entry
}

}  // namespace sparsecomm
