// Payloads that travel with standings: of each rank's only operation.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "engine/proposal.h"
#include "engine/response_cache.h"

namespace sparsecomm {

class Riders {
 public:
  using Id = ResponseCache::Id;
  using Bytes = std::span<const std::byte>;
  static constexpr std::size_t longest = sizeof(Id) + max_payload_bytes;

  void clear() {
    own_.clear();
    arrived_.clear();
  }
  void set_own(Id id, Bytes payload) {
    own_.resize(sizeof id);
    std::memcpy(own_.data(), &id, sizeof id);
    own_.insert(own_.end(), payload.begin(), payload.end());
  }
  // Nothing, unless this rank has set any.
  Bytes own() const { return own_; }
  // [rank]: what has come from each rank, if anything has.
  std::vector<Bytes>& arrived() { return arrived_; }
  // [rank]: the payloads of that operation; empty if a rank has sent none. Once.
  std::span<const Bytes> take(Id id) {
    for (Bytes const rider : arrived_) {
      if (rider.size() < sizeof id || std::memcmp(rider.data(), &id, sizeof id) != 0) return {};
    }
    for (Bytes& rider : arrived_) rider = rider.subspan(sizeof id);
    return arrived_;
  }

 private:
  std::vector<std::byte> own_;
  std::vector<Bytes> arrived_;
};

}  // namespace sparsecomm
