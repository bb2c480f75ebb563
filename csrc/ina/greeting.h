// The first words on a connection to an aggregator: who connects, whether it may, and whether
// messages go over UCX.
#pragma once

#include <cstddef>
#include <cstdint>
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

// Followed first by `text_bytes` of why not; none: welcome.
struct InaAnswer {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t text_bytes;
  std::uint16_t introduction_bytes;  // zero after a text
  std::uint16_t reserved[3];         // zero
  std::uint64_t token;
};
static_assert(sizeof(InaAnswer) == 24);

inline constexpr std::uint32_t greeting_magic = 0x494e4153;  // "SANI"
inline constexpr std::size_t most_answer_text = 1024;

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

// Welcome.
std::vector<std::byte> make_answer(UcxOffer const& offer = {});
// A longer text is cut.
std::vector<std::byte> make_refusal(std::string_view problem);
struct ParsedAnswer {
  std::size_t text_bytes = 0, introduction_bytes = 0;
  std::uint64_t token = 0;
};
ParsedAnswer parse_answer(std::span<const std::byte, sizeof(InaAnswer)> bytes);

}  // namespace sparsecomm
