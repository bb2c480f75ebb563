// A failure report as bytes, for the boards of transports whose ranks are processes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

std::string serialize_report(FailureReport const& report);

// Null where the bytes are not a report of one of `size` ranks.
std::optional<FailureReport> parse_report(std::string_view bytes, int size);

// Reads all reports from a board that shows one at a time.
class ReportReader {
 public:
  explicit ReportReader(int size) : known_(size), reports_(size) {}

  // read(rank) returns what that rank has posted, if it has. Looks at those that are not known yet,
  // until that brings nothing new: so where a report is known, all are that were posted before it.
  // A rank that one says is gone would otherwise seem to have left none.
  template <class Read>
  void look(Read&& read) {
    for (bool news = true; news;) {
      news = false;
      for (std::size_t rank = 0; rank < known_.size(); ++rank) {
        if (known_[rank]) continue;
        std::optional<std::string> const bytes = read(static_cast<int>(rank));
        if (!bytes) continue;
        reports_[rank] = parse_report(*bytes, static_cast<int>(known_.size()));
        known_[rank] = news = true;
      }
    }
  }

  std::vector<std::optional<FailureReport>> const& reports() const { return reports_; }
  bool complete() const { return std::ranges::all_of(known_, std::identity()); }

 private:
  std::vector<bool> known_;
  std::vector<std::optional<FailureReport>> reports_;
};

}  // namespace sparsecomm
