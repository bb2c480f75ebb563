// Where the ranks publish what went wrong, and where they are while they wait, outside of the
// connections that may be broken: a store.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/transport.h"

namespace sparsecomm {

class FailureBoard {
 public:
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int size);
  ~FailureBoard();
  FailureBoard(FailureBoard const&) = delete;
  FailureBoard& operator=(FailureBoard const&) = delete;

  void post(int rank, FailureReport const& report) noexcept;
  // What has been read so far. The first call starts a thread that reads on: a read from a store
  // whose host has stopped may never return, and must not hold up whoever asks.
  std::vector<std::optional<FailureReport>> reports() noexcept;

  // As Transport has them. Questions are asked over a connection of their own, for the same reason.
  void post_status(int rank, std::string_view status) noexcept;
  std::vector<std::string> statuses() noexcept;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  bool reading_ = false;
};

}  // namespace sparsecomm
