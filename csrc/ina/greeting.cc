#include "ina/greeting.h"

#include <algorithm>
#include <cstring>
#include <ranges>

namespace sparsecomm {
namespace {

void check_version(std::uint32_t magic, std::uint16_t version, std::string_view other) {
  require<MalformedFrame>(magic == greeting_magic, "greeting: magic is ", magic, ", must be ",
                          greeting_magic, ": this is no ", other);
  require<MalformedFrame>(version == ina_version, "greeting: the ", other, " speaks version ",
                          version, " of the protocol, must be ", int(ina_version),
                          "; workers and aggregators need the same release");
}

// Both or neither of them.
void check_offer(std::size_t introduction_bytes, std::uint64_t token) {
  require<MalformedFrame>(introduction_bytes <= UcxMessages::most_introduction,
                          "greeting: introduction_bytes is ", introduction_bytes,
                          ", must be at most ", UcxMessages::most_introduction);
  require<MalformedFrame>((introduction_bytes == 0) == (token == 0), "greeting: token is ", token,
                          ", must ", introduction_bytes == 0 ? "" : "not ",
                          "be 0 with introduction_bytes of ", introduction_bytes);
}

void check_reserved(std::span<const std::uint16_t> reserved) {
  for (std::uint16_t const value : reserved) {
    require<MalformedFrame>(value == 0, "greeting: reserved is ", value, ", must be 0");
  }
}

template <class Fixed>
std::vector<std::byte> join(Fixed const& fixed, std::string_view text) {
  std::vector<std::byte> bytes(sizeof(fixed) + text.size());
  std::memcpy(bytes.data(), &fixed, sizeof(fixed));
  std::ranges::copy(std::as_bytes(std::span(text)), bytes.begin() + sizeof(fixed));
  return bytes;
}

}  // namespace

std::vector<std::byte> make_greeting(JobMember const& member, UcxOffer const& offer) {
  return join(
      InaGreeting{.magic = greeting_magic,
                  .version = ina_version,
                  .workers = member.workers,
                  .worker = member.worker,
                  .introduction_bytes = static_cast<std::uint16_t>(offer.introduction.size()),
                  .reserved = {},
                  .job = {member.job[0], member.job[1]},
                  .token = offer.token},
      offer.introduction);
}

ParsedGreeting parse_greeting(std::span<const std::byte, sizeof(InaGreeting)> bytes) {
  InaGreeting greeting;
  std::memcpy(&greeting, bytes.data(), sizeof(greeting));
  check_version(greeting.magic, greeting.version, "worker");
  check_reserved(greeting.reserved);
  require<MalformedFrame>(greeting.worker < greeting.workers, "greeting: worker is ",
                          greeting.worker, ", must be less than the ", greeting.workers,
                          " workers");
  check_offer(greeting.introduction_bytes, greeting.token);
  return {.member = {.job = {greeting.job[0], greeting.job[1]},
                     .workers = greeting.workers,
                     .worker = greeting.worker},
          .introduction_bytes = greeting.introduction_bytes,
          .token = greeting.token};
}

std::vector<std::byte> make_answer(UcxOffer const& offer) {
  return join(InaAnswer{.magic = greeting_magic,
                        .version = ina_version,
                        .text_bytes = 0,
                        .introduction_bytes = static_cast<std::uint16_t>(offer.introduction.size()),
                        .reserved = {},
                        .token = offer.token},
              offer.introduction);
}

std::vector<std::byte> make_refusal(std::string_view problem) {
  auto const text = problem.substr(0, most_answer_text);
  return join(InaAnswer{.magic = greeting_magic,
                        .version = ina_version,
                        .text_bytes = static_cast<std::uint16_t>(text.size()),
                        .introduction_bytes = 0,
                        .reserved = {},
                        .token = 0},
              text);
}

ParsedAnswer parse_answer(std::span<const std::byte, sizeof(InaAnswer)> bytes) {
  InaAnswer answer;
  std::memcpy(&answer, bytes.data(), sizeof(answer));
  check_version(answer.magic, answer.version, "aggregator");
  check_reserved(answer.reserved);
  require<MalformedFrame>(answer.text_bytes <= most_answer_text, "greeting: text_bytes is ",
                          answer.text_bytes, ", must be at most ", most_answer_text);
  require<MalformedFrame>(answer.text_bytes == 0 || answer.introduction_bytes == 0,
                          "greeting: introduction_bytes is ", answer.introduction_bytes,
                          ", must be 0 after a refusal");
  check_offer(answer.introduction_bytes, answer.token);
  return {.text_bytes = answer.text_bytes,
          .introduction_bytes = answer.introduction_bytes,
          .token = answer.token};
}

}  // namespace sparsecomm
