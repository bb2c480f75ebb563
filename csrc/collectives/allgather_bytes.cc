#include "collectives/allgather_bytes.h"

#include <algorithm>

namespace sparsecomm {

std::span<const std::span<const std::byte>> BytesAllgather::run(Channel& channel,
                                                                std::span<const std::byte> own) {
  auto const ranks = static_cast<std::size_t>(channel.size());
  std::uint64_t const length = own.size();
  // A length over the limit is an error of all ranks alike, below.
  auto const lengths = lengths_.run(channel, Phase::partition, length, [](int, std::uint64_t) {});
  strings_.assign(ranks, {});
  auto const longest = std::ranges::max_element(lengths);
  require<Mismatch>(*longest <= limit_, "rank ", longest - lengths.begin(), " contributes ",
                    *longest, " bytes, a message holds at most ", limit_, "; send less at a time");
  if (*longest == 0) return strings_;

  auto const frame = frame_.take(header_bytes + own.size());
  encode_bytes(channel.stamp(), own, frame);
  auto const frames = gather_.run(channel, Phase::gather, frame, header_bytes + *longest);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    channel.decode_from(static_cast<int>(rank), [&] {
      require<MalformedFrame>(frames[rank].values.size() == lengths[rank],
                              frames[rank].values.size(), " bytes instead of the ", lengths[rank],
                              " announced");
    });
    strings_[rank] = frames[rank].values;
  }
  return strings_;
}

Cost allgather_bytes_cost(int ranks, std::uint64_t longest) {
  Cost const lengths = packed_allgather_cost(ranks, sizeof longest);
  if (longest == 0) return lengths;
  Cost const strings = allgather_cost(ranks, header_bytes + longest);
  return lengths + strings;
}

}  // namespace sparsecomm
