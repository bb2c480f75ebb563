// A failure report as bytes, for the boards of transports whose ranks are processes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/board.h"

namespace sparsecomm {

std::string serialize_report(FailureReport const& report);

// Null where the bytes are not a report of one of `size` ranks.
std::optional<FailureReport> parse_report(std::string_view bytes, int size);

// Reads the reports of `size` ranks from a board that numbers them from 1 as they are posted, each
// behind its rank and a line break.
class ReportReader {
 public:
  explicit ReportReader(int size) : known_(size), reports_(size) {}

  // read(number) returns that report, if it has been posted already. `posted`: the last number
  // drawn. The last comes first, so that with a report come all that were posted before it: a rank
  // that one says is gone would otherwise seem to have left none.
  template <class Read>
  void look(std::int64_t posted, Read&& read) {
    for (std::size_t number = std::min<std::uint64_t>(posted, known_.size()); number > 0;
         --number) {
      if (known_[number - 1]) continue;
      std::optional<std::string> const bytes = read(static_cast<int>(number));
      if (!bytes) continue;
      known_[number - 1] = true;
      keep(*bytes, number);
    }
  }

  std::vector<std::optional<FailureReport>> const& reports() const { return reports_; }

 private:
  void keep(std::string const& bytes, std::uint64_t number);

  std::vector<bool> known_;  // [number - 1]
  std::vector<std::optional<FailureReport>> reports_;
};

}  // namespace sparsecomm
