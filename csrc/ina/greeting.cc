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
std::vector<std::byte> join(Fixed const& fixed, std::span<const std::byte> rest) {
  std::vector<std::byte> bytes(sizeof(fixed) + rest.size());
  std::memcpy(bytes.data(), &fixed, sizeof(fixed));
  std::ranges::copy(rest, bytes.begin() + sizeof(fixed));
  return bytes;
}
template <class Fixed>
std::vector<std::byte> join(Fixed const& fixed, std::string_view text) {
  return join(fixed, std::as_bytes(std::span(text)));
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

std::vector<std::byte> proof_message(Challenge const& challenge,
                                     std::span<const std::byte> greeting) {
  constexpr std::string_view purpose = "sparsecomm aggregator, worker";
  auto const label = std::as_bytes(std::span(purpose));
  std::vector<std::byte> message(label.size() + challenge.size() + greeting.size());
  auto const behind = std::ranges::copy(label, message.begin()).out;
  std::ranges::copy(greeting, std::ranges::copy(challenge, behind).out);
  return message;
}

std::vector<std::byte> make_challenge(Challenge const& challenge) {
  return join(InaAnswer{.magic = greeting_magic,
                        .version = ina_version,
                        .text_bytes = 0,
                        .introduction_bytes = 0,
                        .challenge_bytes = sizeof(Challenge),
                        .reserved = {},
                        .token = 0},
              challenge);
}

std::vector<std::byte> make_answer(UcxOffer const& offer) {
  return join(InaAnswer{.magic = greeting_magic,
                        .version = ina_version,
                        .text_bytes = 0,
                        .introduction_bytes = static_cast<std::uint16_t>(offer.introduction.size()),
                        .challenge_bytes = 0,
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
                        .challenge_bytes = 0,
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
  require<MalformedFrame>(
      answer.challenge_bytes == 0 || answer.challenge_bytes == sizeof(Challenge),
      "greeting: challenge_bytes is ", answer.challenge_bytes, ", must be 0 or ",
      sizeof(Challenge));
  require<MalformedFrame>(
      answer.challenge_bytes == 0 || answer.text_bytes + answer.introduction_bytes == 0,
      "greeting: challenge_bytes is ", answer.challenge_bytes, ", must be 0 with ",
      answer.text_bytes, " bytes of text and ", answer.introduction_bytes, " of introduction");
  return {.text_bytes = answer.text_bytes,
          .introduction_bytes = answer.introduction_bytes,
          .challenge_bytes = answer.challenge_bytes,
          .token = answer.token};
}

}  // namespace sparsecomm
