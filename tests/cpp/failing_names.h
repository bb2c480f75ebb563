// Operations with names, which each rank submits in an order of its own, of which some are
// cancelled, and amid which a rank fails or does not submit one; some ranks join before the last
// step, and then all do: on a simulation.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "named_sums.h"
#include "simulated_ranks.h"

namespace sparsecomm::test {

struct NamesRun {
  static constexpr int steps = 3;

  int ranks = 2;
  std::size_t names = 5;
  std::size_t cached = 1024;
  // Or else a rank lacks a name in the last step.
  std::optional<NetworkFault> fault = {};
  int lacking = 0;
  std::uint64_t seed = 0;

  bool takes_part(int rank, std::size_t step) const {
    bool const leaves = (seed >> (8 + rank)) % 3 == 0;
    return step + 1 < steps || !leaves || (!fault && rank == lacking);
  }
};

inline std::string describe(NamesRun const& run) {
  std::string const shape = concat("seed ", run.seed, ": ", run.names, " names, cache of ",
                                   run.cached, ", ", run.ranks, " ranks, rank ");
  if (!run.fault) return concat(shape, run.lacking, " lacks one");
  return concat(shape, run.fault->rank, " at message ", run.fault->message, ": ",
                name(run.fault->kind));
}

struct NamesOutcome {
  enum class End : std::uint8_t { none, right, wrong, cancelled, failed };
  struct Rank {
    std::vector<End> ends;  // [step * names + name], and of the join
    int last = -1;          // that has joined, if all have
    std::string error;      // the first that accuses ranks
    std::vector<int> culprits;
    std::string other_error;  // that accuses nobody, and is not Aborted
    bool aborted_later = false;
    std::vector<bool> tried, told;  // to cancel it, and that it would be; as ends
  };
  std::vector<Rank> ranks;
  Duration time{};
  int cut_from = -1;
};

inline void run_names(Communicator& communicator, NamesRun const& run, SeededSimulation& simulation,
                      NamesOutcome::Rank& outcome) {
  using End = NamesOutcome::End;
  int const rank = communicator.rank();
  outcome.ends.assign(NamesRun::steps * run.names + 1, End::none);
  outcome.tried.assign(outcome.ends.size(), false);
  outcome.told = outcome.tried;
  auto const accuse = [&](Error const& error) {
    auto const* const peer_error = dynamic_cast<PeerError const*>(&error);
    if (peer_error == nullptr) {
      if (dynamic_cast<Aborted const*>(&error) == nullptr) outcome.other_error = error.what();
      return;
    }
    if (!outcome.error.empty()) return;
    outcome.error = error.what();
    outcome.culprits = peer_error->ranks();
  };
  std::mt19937_64 random(run.seed * 1000 + static_cast<std::uint64_t>(rank));
  bool failed = false;
  for (std::size_t step = 0; step < NamesRun::steps && !failed; ++step) {
    if (!run.takes_part(rank, step)) continue;
    std::vector<std::size_t> order(run.names);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random);
    std::vector<std::pair<std::size_t, Communicator::Handle>> handles;
    std::vector<std::shared_ptr<Sum>> sums;
    for (std::size_t const i : order) {
      bool const lacks = !run.fault && rank == run.lacking && step + 1 == NamesRun::steps && i == 0;
      if (lacks) continue;
      if (random() % 3 == 0) take_time(simulation);
      std::uint64_t const number = 1000 * step + i + static_cast<std::uint64_t>(rank);
      sums.push_back(std::make_shared<Sum>("sum", number, i % 2 == 0));
      handles.emplace_back(i, communicator.submit(sums.back(), {}, concat("name ", i)));
      // Not the one that is lacking.
      if (i == 0 || random() % 16 != 0) continue;
      outcome.tried[step * run.names + i] = true;
      outcome.told[step * run.names + i] = handles.back().second.cancel();
    }
    for (std::size_t at = 0; at < handles.size(); ++at) {
      auto const& [i, handle] = handles[at];
      End& end = outcome.ends[step * run.names + i];
      try {
        handle.wait();
        std::uint64_t expected = 0;
        for (int other = 0; other < run.ranks; ++other) {
          if (!run.takes_part(other, step)) continue;
          expected += 1000 * step + i + static_cast<std::uint64_t>(other);
        }
        end = sums[at]->sum == expected ? End::right : End::wrong;
      } catch (Cancelled const&) {
        end = End::cancelled;
      } catch (Error const& error) {
        end = End::failed;
        failed = true;
        accuse(error);
      }
    }
    if (!failed && !run.fault && rank == run.lacking && step + 1 == NamesRun::steps) failed = true;
  }
  if (!failed) {
    auto const join = std::make_shared<SumJoin>();
    try {
      communicator.submit(join).wait();
      outcome.last = join->last();
      outcome.ends.back() = End::right;
    } catch (Error const& error) {
      outcome.ends.back() = End::failed;
      failed = true;
      accuse(error);
    }
  }
  if (!failed) return;
  // Not before what it lacks is late on the others.
  if (!run.fault && rank == run.lacking) simulation.sleep(2 * CommunicatorOptions().timeout);
  // A rank that had nothing pending when it failed hears of it with its next operation.
  for (int i = 0; i < 2 && !outcome.aborted_later; ++i) {
    try {
      communicator.submit(std::make_shared<Sum>("sum", 0, false), {}, "later").wait();
      return;
    } catch (Aborted const&) {
      outcome.aborted_later = true;
    } catch (Error const& error) {
      accuse(error);
    }
  }
}

inline NamesOutcome simulate_names(NamesRun const& run) {
  SeededSimulation simulation(run.seed);
  NamesOutcome outcome{.ranks = std::vector<NamesOutcome::Rank>(std::size_t(run.ranks))};
  TimePoint const begin = simulation.now();
  std::optional<NetworkFault> fault = run.fault;
  if (fault) fault->receiver = &outcome.cut_from;
  auto const errors = simulate_ranks(
      simulation, run.ranks,
      [&](Communicator& communicator) {
        run_names(communicator, run, simulation, outcome.ranks[std::size_t(communicator.rank())]);
      },
      {.cached_names = run.cached}, fault);
  for (std::exception_ptr const& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  outcome.time = simulation.now() - begin;
  return outcome;
}

inline bool any_of_ranks(NamesOutcome const& outcome, std::vector<bool> NamesOutcome::Rank::* flags,
                         std::size_t operation) {
  return std::ranges::any_of(outcome.ranks,
                             [&](auto const& rank) { return bool((rank.*flags)[operation]); });
}

// Contracts 5 and 7 of each operation, and that cancelling is the same everywhere: the first
// violation, or nothing.
inline std::string find_violation(NamesRun const& run, NamesOutcome const& outcome) {
  using End = NamesOutcome::End;
  using Kind = NetworkFault::Kind;
  bool const all_survive = !run.fault || run.fault->kind == Kind::slow ||
                           run.fault->kind == Kind::cut || run.fault->kind == Kind::split;
  auto const is_lost = [&](int rank) { return !all_survive && rank == run.fault->rank; };
  // A fault at a message that was never sent is none.
  bool const happened =
      std::ranges::any_of(outcome.ranks, [](auto const& rank) { return !rank.error.empty(); });
  for (int rank = 0; rank < run.ranks; ++rank) {
    if (is_lost(rank)) continue;
    auto const& own = outcome.ranks[std::size_t(rank)];
    std::string const who = concat("rank ", rank, " ");
    if (!own.other_error.empty()) return concat(who, "says: ", own.other_error);
    for (int other = 0; other < rank; ++other) {
      if (is_lost(other) || own.last == outcome.ranks[std::size_t(other)].last) continue;
      return concat(who, "and rank ", other, " differ about who joined last");
    }
    for (std::size_t i = 0; i < own.ends.size(); ++i) {
      if (own.ends[i] == End::wrong) return concat(who, "has a wrong sum of operation ", i);
      if (!happened && own.ends[i] == End::failed) return concat(who, "fails alone");
      if (own.ends[i] == End::right && any_of_ranks(outcome, &NamesOutcome::Rank::told, i)) {
        return concat(who, "ran operation ", i, ", which was to be cancelled");
      }
      if (own.ends[i] == End::cancelled && !any_of_ranks(outcome, &NamesOutcome::Rank::tried, i)) {
        return concat(who, "has cancelled operation ", i, ", which nobody did");
      }
      for (int other = 0; other < rank; ++other) {
        std::size_t const step = i / run.names;
        if (is_lost(other) || !run.takes_part(rank, step) || !run.takes_part(other, step)) continue;
        End const theirs = outcome.ranks[std::size_t(other)].ends[i];
        // What was cancelled did not run, and on a rank that has failed by then it fails.
        auto const stands = [](End end) { return end == End::right; };
        bool const differ =
            stands(own.ends[i]) != stands(theirs) || (!happened && own.ends[i] != theirs);
        if (differ) return concat(who, "and rank ", other, " differ about operation ", i);
      }
    }
    if (!happened) continue;
    if (run.fault && run.fault->kind == Kind::slow) return concat(who, "fails: ", own.error);
    if (own.error.empty()) {
      // It may have ended before.
      if (std::ranges::find(own.ends, End::failed) == own.ends.end()) continue;
      return concat(who, "does not hear of the failure");
    }
    if (!own.aborted_later) return concat(who, "goes on with a communicator that has failed");
    if (run.fault && run.fault->kind == Kind::split) continue;
    int const culprit = run.fault ? run.fault->rank : run.lacking;
    bool const is_cut = run.fault && run.fault->kind == Kind::cut;
    bool const right =
        is_cut ? std::ranges::all_of(
                     own.culprits,
                     [&](int named) { return named == culprit || named == outcome.cut_from; })
               : own.culprits == std::vector{culprit};
    if (!right) return concat(who, "does not name rank ", culprit, " but says: '", own.error, "'");
  }
  if (!run.fault && !happened) return "nobody misses what a rank lacks";
  CommunicatorOptions const options;
  if (outcome.time > 3 * options.timeout) return "it took more than three deadlines";
  return "";
}

}  // namespace sparsecomm::test
