// Where the ranks publish what went wrong, outside of the connections that may be broken: a store.
#pragma once

#include <memory>
#include <optional>
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

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  bool reading_ = false;
};

}  // namespace sparsecomm
