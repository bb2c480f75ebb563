// The first words on a connection to an aggregator: who connects, and whether it may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "ina/host.h"

namespace sparsecomm {

// Begin with magic and version in every version. Little-endian.
struct InaGreeting {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t workers;
  std::uint16_t worker;
  std::uint16_t reserved[3];  // zero
  std::uint64_t job[2];
};
static_assert(sizeof(InaGreeting) == 32);

// Followed by `text_bytes` of why not; none: welcome.
struct InaAnswer {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t text_bytes;
};
static_assert(sizeof(InaAnswer) == 8);

inline constexpr std::uint32_t greeting_magic = 0x494e4153;  // "SANI"
inline constexpr std::size_t most_answer_text = 1024;

InaGreeting make_greeting(JobMember const& member);
// Throws MalformedFrame with the field, its value and what it must be.
JobMember parse_greeting(std::span<const std::byte, sizeof(InaGreeting)> bytes);

// Empty: welcome. A longer text is cut.
std::vector<std::byte> make_answer(std::string const& problem);
// Returns the length of the text. Throws MalformedFrame if this is no aggregator, or one of another
// version.
std::size_t parse_answer(std::span<const std::byte, sizeof(InaAnswer)> bytes);

}  // namespace sparsecomm
