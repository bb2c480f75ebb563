#include "transport/failure_report.h"

#include <charconv>
#include <iterator>
#include <sstream>

namespace sparsecomm {

std::string serialize_report(FailureReport const& report) {
  std::ostringstream out;
  out << report.operation << ' ' << int(report.cause) << ' ' << report.committing << ' '
      << report.suspects.size();
  for (int const rank : report.suspects) out << ' ' << rank;
  out << ' ' << report.sent.size();
  for (auto const count : report.sent) out << ' ' << count;
  for (auto const count : report.received) out << ' ' << count;
  out << '\n' << report.text;
  return std::move(out).str();
}

std::optional<FailureReport> parse_report(std::string_view bytes, int size) {
  std::istringstream in{std::string(bytes)};
  FailureReport report;
  auto const ranks = static_cast<std::size_t>(size);
  int cause = -1;
  std::size_t suspects = 0;
  in >> report.operation >> cause >> report.committing >> suspects;
  if (!in || cause < 0 || cause > int(FailureReport::Cause::absent) || suspects > ranks) {
    return std::nullopt;
  }
  report.cause = static_cast<FailureReport::Cause>(cause);
  report.suspects.resize(suspects);
  for (int& rank : report.suspects) {
    in >> rank;
    if (!in || rank < 0 || rank >= size) return std::nullopt;
  }
  // Whoever closes its communicator reports no counts.
  std::size_t counted = 0;
  in >> counted;
  if (!in || (counted != 0 && counted != ranks)) return std::nullopt;
  report.sent.resize(counted);
  report.received.resize(counted);
  for (auto* const counts : {&report.sent, &report.received}) {
    for (std::uint64_t& count : *counts) in >> count;
  }
  if (!in) return std::nullopt;
  in.get();
  report.text.assign(std::istreambuf_iterator<char>(in), {});
  return report;
}

void ReportReader::keep(std::string const& bytes, std::uint64_t number) {
  std::size_t rank = reports_.size();
  char const* const last = bytes.data() + bytes.size();
  auto const [end, error] = std::from_chars(bytes.data(), last, rank);
  if (error != std::errc() || rank >= reports_.size() || end == last || *end != '\n') return;
  auto& report = reports_[rank];
  report = parse_report(std::string_view(end + 1, last), static_cast<int>(reports_.size()));
  if (report) report->number = number;
}

}  // namespace sparsecomm
