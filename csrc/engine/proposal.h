// What a rank is about to do, which all ranks compare before an operation moves data.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace sparsecomm {

// A 64-bit FNV-1a hash, field by field. Fields of different lengths do not run together.
class Digest {
 public:
  template <class N>
    requires std::integral<N> || std::floating_point<N>
  Digest& add(N number) {
    return mix(std::as_bytes(std::span(&number, 1)));
  }
  Digest& add(std::span<const std::byte> bytes) { return add(bytes.size()).mix(bytes); }
  Digest& add(std::string_view text) { return add(std::as_bytes(std::span(text))); }
  std::uint64_t value() const { return hash_; }

 private:
  Digest& mix(std::span<const std::byte> bytes) {
    for (std::byte const byte : bytes) {
      hash_ = (hash_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3u;
    }
    return *this;
  }

  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

struct Proposal {
  // "name=value;name=value": what stays the same from one run of the operation to the next. Stays
  // valid until the operation has ended.
  std::string_view text;
  // Of the text and of Operation::changing_fields(): ranks must agree on all of it.
  Digest digest = Digest().add(text);
  std::optional<std::uint64_t> step = {};  // shown when the operation stalls
  bool finite = true;                      // no NaN or Inf in what this rank contributes
  std::uint64_t entries = 0;               // that this rank contributes; ranks may differ in it
  // The unit of what this rank contributes. Ranks that name one must agree on it; 0: this one
  // takes that of the others.
  double loss_scale = 0;
  // What this rank found in the former operation of this kind, for a plan; 0: nothing.
  double former_seconds = 0;
  std::uint64_t former_entries = 0;
  // Neither number of entries is larger on any rank; part of the digest in some form.
  std::uint64_t extent = 0;
};

}  // namespace sparsecomm
