// Small arrays of figures from every rank: combined over all ranks, or everybody's own.
//
// CensusAllreduce  A rank holds what the ranks at distances 1 to `count` from it combine to and
//                  gets the same of the rank beyond those, with that rank's own figures where the
//                  next binary digit of P - 1 is a one. ceil(log2 P) messages of one array each,
//                  for any P and any commutative operation. Bar-Noy, Kipnis and Schieber 1993; if P
//                  is a power of two this is recursive doubling.
// PackedAllgather  Bruck's, with one frame per message instead of one per rank: ceil(log2 P)
//                  messages, P - 1 arrays and ceil(log2 P) headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/algorithm.h"
#include "collectives/patterns.h"

namespace sparsecomm {

// Sends `figures` to `destination` while as many arrive from `source`. Throws PeerInvalid where
// another number of bytes arrives.
template <class T>
class FigureExchange {
 public:
  void run(Channel& channel, Phase phase, int destination, std::span<const T> figures, int source,
           std::span<T> arrived) {
    auto const outgoing = send_.take(header_bytes + figures.size_bytes());
    auto const incoming = receive_.take(header_bytes + arrived.size_bytes());
    encode_bytes(channel.stamp(), std::as_bytes(figures), outgoing);
    Request receive = channel.irecv(source, phase, incoming);
    Request send = channel.isend(destination, phase, outgoing);
    FrameView const frame = channel.wait_frame(receive, source, incoming);
    channel.decode_from(source, [&] {
      require<MalformedFrame>(frame.values.size() == arrived.size_bytes(), "figures of ",
                              frame.values.size(), " bytes instead of ", arrived.size_bytes());
    });
    std::memcpy(arrived.data(), frame.values.data(), arrived.size_bytes());
    channel.wait(send);
  }

 private:
  ByteBuffer send_, receive_;
};

template <class T>
class CensusAllreduce {
 public:
  // Replaces each of `figures`, as many on every rank, by combine() of it over all ranks.
  // check(figures, ranks) throws MalformedFrame where so many ranks together can't have those.
  // Where they arrive so, it is held against their sender, since a rank passes on only what it has
  // checked itself; where what has arrived becomes so when it is combined, against all ranks it is
  // of.
  template <class Combine, class Check>
  void run(Channel& channel, Phase phase, std::span<T> figures, Combine combine, Check check) {
    int const rank = channel.rank();
    int const size = channel.size();
    int count = 0;  // ranks that others_ combines, those at distances 1 to count
    arrived_.resize(figures.size());
    check(std::span<const T>(figures), 1);
    auto const check_combined = [&](std::span<const T> combined, int ranks) {
      try {
        check(combined, ranks);
      } catch (MalformedFrame const& error) {
        std::vector<int> others;
        for (int i = 1; i <= count; ++i) others.push_back(rank_at(i, rank, size));
        std::ranges::sort(others);
        std::string const text = concat("the figures of ", join_ranks(others),
                                        " contradict one another: ", error.what());
        throw PeerInvalid(text, std::move(others));
      }
    };
    for (int digit = bruck_rounds(size); digit-- > 0;) {
      bool const with_own = ((size - 1) >> digit) % 2 != 0;
      int const distance = count + (with_own ? 1 : 0);  // of ranks; and so many are combined
      if (count == 0) {
        together_.assign(figures.begin(), figures.end());
      } else {
        together_ = others_;
        if (with_own) {
          std::ranges::transform(together_, figures, together_.begin(), combine);
          check_combined(together_, distance);
        }
      }
      int const source = rank_at(distance, rank, size);
      exchange_.run(channel, phase, rank_before(distance, rank, size), together_, source, arrived_);
      channel.decode_from(source, [&] { check(std::span<const T>(arrived_), distance); });
      if (count == 0) {
        others_ = arrived_;
      } else {
        std::ranges::transform(others_, arrived_, others_.begin(), combine);
      }
      count += distance;
      check_combined(others_, count);
    }
    if (count > 0) std::ranges::transform(figures, others_, figures.begin(), combine);
  }

 private:
  FigureExchange<T> exchange_;
  std::vector<T> others_, together_, arrived_;
};

template <class T>
class PackedAllgather {
 public:
  // Element r of the result is that of rank r, own included; valid until the next run().
  // check(rank, figure) throws MalformedFrame where that rank can't have it; it is held against the
  // rank that passed it on, which has checked it too.
  template <class Check>
  std::span<const T> run(Channel& channel, Phase phase, T const& own, Check check) {
    int const rank = channel.rank();
    int const size = channel.size();
    rotated_.resize(size);
    rotated_[0] = own;
    auto const all = std::span(rotated_);
    for_each_bruck_round(rank, size, [&](BruckRound const& round) {
      auto const arrived = all.subspan(round.first, round.count);
      exchange_.run(channel, phase, round.destination, all.first(round.count), round.source,
                    arrived);
      channel.decode_from(round.source, [&] {
        for (int i = 0; i < round.count; ++i) check(rank_at(i, round.source, size), arrived[i]);
      });
    });
    figures_.resize(size);
    for (int step = 0; step < size; ++step) figures_[rank_at(step, rank, size)] = rotated_[step];
    return figures_;
  }

 private:
  FigureExchange<T> exchange_;
  std::vector<T> rotated_, figures_;
};

// `bytes`: of one rank's array.
Cost census_cost(int ranks, double bytes);
Cost packed_allgather_cost(int ranks, double bytes);

}  // namespace sparsecomm
