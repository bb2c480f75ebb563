// The first words on a connection to an aggregator: who connects, whether it may, and whether
// messages go over UCX.
//
// 1. The worker greets.
// 2. An aggregator that asks for tokens answers with a challenge, drawn at random for this
// connection;
//    the worker answers with a proof: an HMAC with SHA-256, whose key is its token, of
//    proof_message(). A proof that was overheard is of no use on another connection.
// 3. The aggregator answers: welcome, or why not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "ina/host.h"
#include "transport/ucx_messages.h"

namespace sparsecomm {

// Begin with magic and version in every version. Little-endian. Each is followed by
// `introduction_bytes` of UcxMessages::introduction(), if its sender can use UCX, whose messages
// are to name `token`; without, that is zero.
struct InaGreeting {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t workers;
  std::uint16_t worker;
  std::uint16_t introduction_bytes;
  std::uint16_t reserved[2];  // zero
  std::uint64_t job[2];
  std::uint64_t token;
};
static_assert(sizeof(InaGreeting) == 40);

// Followed first by `text_bytes` of why not; none: welcome. Or, with `challenge_bytes`, by a
// challenge, and by another answer after the proof.
struct InaAnswer {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t text_bytes;
  std::uint16_t introduction_bytes;  // zero after a text
  std::uint16_t challenge_bytes;     // zero, or a Challenge's and all else but the first two zero
  std::uint16_t reserved[2];         // zero
  std::uint64_t token;
};
static_assert(sizeof(InaAnswer) == 24);

inline constexpr std::uint32_t greeting_magic = 0x494e4153;  // "SANI"
inline constexpr std::size_t most_answer_text = 1024;

using Challenge = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;
// Makes the proof of a message, with the worker's token.
using Prover = std::function<Proof(std::span<const std::byte> message)>;

// What a side offers for UCX; without an introduction, nothing.
struct UcxOffer {
  std::string introduction;
  std::uint64_t token = 0;
};

std::vector<std::byte> make_greeting(JobMember const& member, UcxOffer const& offer = {});
// What the fixed part says, of which the sizes tell what follows. Throw MalformedFrame with the
// field, its value and what it must be.
struct ParsedGreeting {
  JobMember member;
  std::size_t introduction_bytes = 0;
  std::uint64_t token = 0;
};
ParsedGreeting parse_greeting(std::span<const std::byte, sizeof(InaGreeting)> bytes);

// What a proof is of: the challenge and all of the greeting.
std::vector<std::byte> proof_message(Challenge const& challenge,
                                     std::span<const std::byte> greeting);

std::vector<std::byte> make_challenge(Challenge const& challenge);
// Welcome.
std::vector<std::byte> make_answer(UcxOffer const& offer = {});
// A longer text is cut.
std::vector<std::byte> make_refusal(std::string_view problem);
struct ParsedAnswer {
  std::size_t text_bytes = 0, introduction_bytes = 0, challenge_bytes = 0;
  std::uint64_t token = 0;
};
ParsedAnswer parse_answer(std::span<const std::byte, sizeof(InaAnswer)> bytes);

}  // namespace sparsecomm
