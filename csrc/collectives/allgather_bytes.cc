#include "collectives/allgather_bytes.h"

#include <algorithm>
#include <cstring>

namespace sparsecomm {

std::span<const std::span<const std::byte>> BytesAllgather::run(Channel& channel,
                                                                std::span<const std::byte> own) {
  auto const ranks = static_cast<std::size_t>(channel.size());
  std::uint64_t const length = own.size();
  auto frame = frame_.take(header_bytes + sizeof length);
  encode_bytes(channel.operation(), std::as_bytes(std::span(&length, 1)), frame);
  auto const announced = length_gather_.run(channel, Phase::partition, frame, frame.size());
  lengths_.resize(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    channel.decode_from(static_cast<int>(rank), [&] {
      require<MalformedFrame>(announced[rank].values.size() == sizeof length, "a length of ",
                              announced[rank].values.size(), " bytes");
    });
    std::memcpy(&lengths_[rank], announced[rank].values.data(), sizeof length);
  }
  strings_.assign(ranks, {});
  auto const longest = std::ranges::max_element(lengths_);
  require<Mismatch>(*longest <= limit_, "rank ", longest - lengths_.begin(), " contributes ",
                    *longest, " bytes, a message holds at most ", limit_, "; send less at a time");
  if (*longest == 0) return strings_;

  frame = frame_.take(header_bytes + own.size());
  encode_bytes(channel.operation(), own, frame);
  auto const frames = gather_.run(channel, Phase::gather, frame, header_bytes + *longest);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    channel.decode_from(static_cast<int>(rank), [&] {
      require<MalformedFrame>(frames[rank].values.size() == lengths_[rank],
                              frames[rank].values.size(), " bytes instead of the ", lengths_[rank],
                              " announced");
    });
    strings_[rank] = frames[rank].values;
  }
  return strings_;
}

Cost allgather_bytes_cost(int ranks, std::uint64_t longest) {
  Cost const lengths = allgather_cost(ranks, header_bytes + sizeof longest);
  if (longest == 0) return lengths;
  Cost const strings = allgather_cost(ranks, header_bytes + longest);
  return lengths + strings;
}

}  // namespace sparsecomm
