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

// The longest payload.
inline constexpr std::size_t max_payload_bytes = 24;

struct Proposal {
  // "name=value;name=value": what stays the same from one run of the operation to the next. Stays
  // valid until the operation has ended.
  std::string_view text;
  // Identifies the operation: a digest of the text, and of whatever else stays the same. Ranks must
  // agree on it.
  std::uint64_t key = Digest().add(text).value();
  // A digest of what ranks must agree on as well, but may change from one run to the next.
  std::uint64_t changing = 0;
  // Tells this rank, and nobody else, whether `changing` may differ from the other ranks' though it
  // did not when they were last compared: only if this is another number. Between these `changing`
  // changes by nothing but data on which ranks have agreed. None: it may differ whenever it
  // changes.
  std::optional<std::uint64_t> version = {};
  std::optional<std::uint64_t> step = {};  // shown when the operation stalls
  bool finite = true;                      // no NaN or Inf in what this rank contributes
  // Bytes of the operation's own for all ranks, see Operation::merge(). At most max_payload_bytes,
  // as many on all ranks with the same key; they stay valid until the agreement.
  std::span<const std::byte> payload = {};
  // They say nothing that the other ranks do not know: if no rank has more to say they may be left
  // out, and then Agreement::payload is empty.
  bool payload_is_known = false;
};

}  // namespace sparsecomm
