// What the options of a gradient's exchange may be.
#include <bit>
#include <cmath>
#include <limits>

#include "base/shortest.h"
#include "engine/gradient_exchange.h"

namespace sparsecomm {
namespace {

std::string_view name(ValueCodec codec) { return value_codec_for(codec, DType::f32).name; }

std::string_view name(IndexCodecChoice choice) {
  IndexCodecEntry const* const entry = find_index_codec(static_cast<IndexCodec>(choice));
  return entry != nullptr ? entry->name : "smallest";
}

}  // namespace

void validate(VelocityRule const& rule) {
  // Velocities may be f32.
  using Limits = std::numeric_limits<float>;
  require(rule.momentum == 0 ||
              (rule.momentum >= Limits::min() && rule.momentum <= 1 - Limits::epsilon()),
          "momentum = ", Shortest{rule.momentum},
          " is not in [0, 1) as a float32: 0.9 is usual, 0 is none");
  require(rule.gain >= Limits::min() && rule.gain <= Limits::max(), "gain = ", Shortest{rule.gain},
          " is no positive finite float32: 1 is usual, 1 - momentum makes the velocity an average");
  require(!rule.nesterov || rule.momentum > 0,
          "nesterov has no place where momentum = ", rule.momentum,
          ": give it the momentum, or leave nesterov out");
}

void validate(ExchangeOptions const& options) {
  bool const planned = options.algorithm == auto_algorithm;
  bool const rounds = !planned && find_algorithm(options.algorithm).rounds;
  ValueCodec const codec = options.collective.frame.value_codec;
  if (auto const& entry = value_codec_for(codec, DType::f32); entry.lossy && !rounds) {
    std::string rounding;
    for (AlgorithmEntry const& other : algorithms()) {
      if (other.rounds) rounding += concat(rounding.empty() ? "" : ", ", other.name);
    }
    throw InvalidArgument(concat("algorithm '", options.algorithm, "' does not round values to ",
                                 entry.name, "; these do: ", rounding));
  }
  require(options.density > 0 && options.density <= 1, "density = ", options.density,
          " is not in (0, 1]; 0.01 sends one entry in a hundred");
  for (double const density : options.warmup.stages) {
    require(density > 0 && density <= 1, "a warm-up's density of ", density, " is not in (0, 1]");
  }
  require(options.warmup.stage_steps >= 1, "a warm-up's stage of ", options.warmup.stage_steps,
          " steps: use 1 or more");
  SelectionRule const& rule = options.rule;
  require(rule.bucket <= max_bucket, "bucket = ", rule.bucket, " entries: choose 1 to ", max_bucket,
          ", or 0 for none");
  require(rule.block == 0 || (std::has_single_bit(rule.block) && rule.block >= least_block &&
                              rule.block <= most_block),
          "block = ", rule.block, " entries: choose a power of two from ", least_block, " to ",
          most_block, ", or 0 for none");
  require(rule.block == 0 || rule.bucket == 0, "block = ", rule.block,
          " and bucket = ", rule.bucket, " exclude each other: choose one of them");
  validate(rule.velocity);
  require(rule.first_moment >= 0 && rule.first_moment < 1, "first_moment = ", rule.first_moment,
          " is not in [0, 1): give it the first beta of Adam, or 0 for none");
  VelocityRule const& velocity = rule.velocity;
  require(velocity.momentum == 0 || rule.first_moment == 0, "momentum = ", velocity.momentum,
          " (for SGD) and first_moment = ", rule.first_moment, " (for Adam) exclude each other");
  require(velocity.gain == 1 || rule.first_moment == 0, "gain = ", velocity.gain,
          " and first_moment = ", rule.first_moment,
          " exclude each other: a gain is of the velocity, or of what is added without one");
  require(!rule.accumulates() || planned || options.feedback ||
              find_algorithm(options.algorithm).sparse,
          "algorithm '", options.algorithm,
          "' sends every entry and keeps nothing: it takes no bucket, block, momentum, gain or "
          "first_moment");
  require(!options.shares_density || (rule.bucket == 0 && rule.block == 0),
          "groups that share a density go by their thresholds, which bucket = ", rule.bucket,
          " and block = ", rule.block, " have not: leave both at 0");
  require(options.schedule.period >= 1, "threshold period = ", options.schedule.period,
          " is not a number of steps; use 1 or more");
  require(options.collective.partition_period >= 1,
          "partition_period = ", options.collective.partition_period,
          " is not a number of steps; use 1 or more");
  require(options.collective.balance_factor >= 1,
          "balance_factor = ", options.collective.balance_factor,
          " is below 1; the largest share is never below the average");
  require(options.collective.window >= 1, "window = ", options.collective.window,
          " receives at a time is below 1");
  require(options.collective.overlap_chunk >= 1,
          "overlap_chunk = ", options.collective.overlap_chunk,
          " elements is below 1; use 262144 or so");
  require_block_bytes(options.collective.block_bytes);
  require(options.collective.delta >= 0 && options.collective.delta <= 1,
          "delta = ", options.collective.delta,
          " is not a density in [0, 1]; 0 switches where pairs would be larger than all values");
}

std::string text_of(std::string const& group, std::uint64_t extent, DType dtype,
                    ExchangeOptions const& options) {
  AlgorithmOptions const& collective = options.collective;
  SelectionRule const& rule = options.rule;
  // Options that other ranks do not notice are left out: `feedback`, which is of a rank's own
  // residual; `window`, the messages that a rank sums at once; and how it encodes indices, which
  // each frame tells. A plan predicts by that, though, and ranks must plan alike.
  std::string planned;
  if (options.algorithm == auto_algorithm) {
    planned = concat(";index_codec=", name(collective.frame.index_codec));
  }
  return concat("operation=gradient exchange;group=", group, ";numel=", extent,
                ";dtype=", name(dtype), ";algorithm=", options.algorithm,
                ";average=", options.average, ";schedule=", name(options.schedule.between), '/',
                options.schedule.period, ";partition_period=", collective.partition_period,
                ";balance_factor=", Shortest{collective.balance_factor},
                ";value_codec=", name(collective.frame.value_codec),
                ";overlap_chunk=", collective.overlap_chunk,
                ";block_bytes=", collective.block_bytes, ";delta=", Shortest{collective.delta},
                ";dense_codec=", name(collective.dense_codec), planned, ";seed=", collective.seed,
                ";dense_steps=", options.warmup.dense_steps, ";bucket=", rule.bucket,
                ";block=", rule.block, ";momentum=", Shortest{rule.velocity.momentum},
                ";gain=", Shortest{rule.velocity.gain}, ";nesterov=", rule.velocity.nesterov,
                ";mask_momentum=", rule.mask_momentum,
                ";first_moment=", Shortest{rule.first_moment},
                options.groups.empty() ? "" : ";groups=", options.groups,
                options.shares_density ? ";density_scope=model" : "");
}

}  // namespace sparsecomm
