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

}  // namespace

InaGreeting make_greeting(JobMember const& member) {
  return {.magic = greeting_magic,
          .version = ina_version,
          .workers = member.workers,
          .worker = member.worker,
          .reserved = {},
          .job = {member.job[0], member.job[1]}};
}

JobMember parse_greeting(std::span<const std::byte, sizeof(InaGreeting)> bytes) {
  InaGreeting greeting;
  std::memcpy(&greeting, bytes.data(), sizeof(greeting));
  check_version(greeting.magic, greeting.version, "worker");
  for (std::uint16_t const value : greeting.reserved) {
    require<MalformedFrame>(value == 0, "greeting: reserved is ", value, ", must be 0");
  }
  require<MalformedFrame>(greeting.worker < greeting.workers, "greeting: worker is ",
                          greeting.worker, ", must be less than the ", greeting.workers,
                          " workers");
  return {.job = {greeting.job[0], greeting.job[1]},
          .workers = greeting.workers,
          .worker = greeting.worker};
}

std::vector<std::byte> make_answer(std::string const& problem) {
  auto const text = std::string_view(problem).substr(0, most_answer_text);
  InaAnswer const answer{.magic = greeting_magic,
                         .version = ina_version,
                         .text_bytes = static_cast<std::uint16_t>(text.size())};
  std::vector<std::byte> bytes(sizeof(answer) + text.size());
  std::memcpy(bytes.data(), &answer, sizeof(answer));
  std::ranges::copy(std::as_bytes(std::span(text)), bytes.begin() + sizeof(answer));
  return bytes;
}

std::size_t parse_answer(std::span<const std::byte, sizeof(InaAnswer)> bytes) {
  InaAnswer answer;
  std::memcpy(&answer, bytes.data(), sizeof(answer));
  check_version(answer.magic, answer.version, "aggregator");
  require<MalformedFrame>(answer.text_bytes <= most_answer_text, "greeting: text_bytes is ",
                          answer.text_bytes, ", must be at most ", most_answer_text);
  return answer.text_bytes;
}

}  // namespace sparsecomm
