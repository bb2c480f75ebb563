// One input of the fuzzer of texts: what ranks read of one another on boards and in the store. The
// first byte selects what the rest is parsed as, the second says how many ranks there are.
//
// Anything thrown is a bug, and what is parsed must survive being written and parsed again, and
// being drawn conclusions from.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/stall.h"
#include "engine/verdict.h"
#include "frame_fuzz.h"
#include "transport/failure_report.h"
#include "transport/process.h"

namespace sparsecomm::fuzz {

inline void report(std::string const& text, int size) {
  auto const found = parse_report(text, size);
  if (!found) return;
  for (int const suspect : found->suspects) check(suspect >= 0 && suspect < size, "a suspect");
  std::string const written = serialize_report(*found);
  auto const again = parse_report(written, size);
  check(again.has_value() && serialize_report(*again) == written, "a report changed");
  // Of one rank, of all, and beside one that says something else.
  std::vector<std::optional<FailureReport>> reports(static_cast<std::size_t>(size));
  reports.front() = found;
  settled(reports);
  check(!conclude(reports).culprits.empty(), "nobody is to blame");
  reports.assign(reports.size(), found);
  settled(reports);
  check(!conclude(reports).culprits.empty(), "nobody is to blame where all say the same");
  reports.back() = FailureReport{
      .operation = 7, .cause = FailureReport::Cause::timeout, .suspects = {0}, .text = {}};
  settled(reports);
  check(!conclude(reports).culprits.empty(), "nobody is to blame where one differs");
}

inline void whereabouts(std::string const& text, int size) {
  auto const found = parse_whereabouts(text, size);
  if (!found) return;
  std::string const written = serialize_whereabouts(*found);
  auto const again = parse_whereabouts(written, size);
  check(again.has_value() && serialize_whereabouts(*again) == written, "whereabouts changed");
  std::vector<std::optional<Whereabouts>> others(static_cast<std::size_t>(size));
  others.back() = found;
  describe_stall(0, *found, others, std::chrono::seconds(1));
  others.assign(others.size(), found);
  describe_stall(0,
                 {.operation = 3, .running = true, .awaited = everybody, .seconds = 1, .what = {}},
                 others, std::chrono::seconds(1));
  describe_proposal(found->what);
}

inline void verdict(std::string const& text, int size) {
  auto const found = parse_verdict(text, size);
  if (!found) return;
  check(!found->culprits.empty(), "nobody is to blame");
  std::string const written = serialize_verdict(*found);
  auto const again = parse_verdict(written, size);
  check(again.has_value() && serialize_verdict(*again) == written, "a verdict changed");
}

inline void identity(std::string const& text) {
  auto const found = ProcessIdentity::parse(text);
  if (!found) return;
  auto const again = ProcessIdentity::parse(found->text());
  check(again.has_value() && again->text() == found->text(), "an identity changed");
  has_ended(*found);
  watch_process(*found);
}

inline void run_text(std::span<const std::byte> data) {
  if (data.size() < 2) return;
  std::string const text(reinterpret_cast<char const*>(data.data()) + 2, data.size() - 2);
  int const size = 1 + std::to_integer<int>(data[1]) % 8;
  switch (std::to_integer<int>(data[0]) % 4) {
    case 0:
      return report(text, size);
    case 1:
      return whereabouts(text, size);
    case 2:
      return identity(text);
    default:
      return verdict(text, size);
  }
}

}  // namespace sparsecomm::fuzz
