// Which of the operations that were submitted runs next, alike on all ranks.
#pragma once

#include <exception>
#include <memory>

#include "collectives/channel.h"
#include "engine/comparison.h"
#include "engine/observer.h"
#include "engine/operation.h"
#include "engine/ticket.h"

namespace sparsecomm {

// An operation whose turn it is.
struct Scheduled {
  Pending pending = {};
  Agreement agreement = {};
  std::exception_ptr error = {};  // it is not to run: the same on all ranks
  ObservedStage whole = {};       // of the operation, since it is prepared
};

class Coordinator {
 public:
  virtual ~Coordinator() = default;

  // From any thread.
  virtual void add(Pending pending) = 0;
  virtual bool empty() const = 0;

  // The following are for one thread at a time, where it is not empty.

  // Decides with all other ranks what runs next, and hands it over, with the observer's
  // Stage::whole begun before it was prepared. What it throws ends the communicator; then nothing
  // has been handed over.
  virtual void round(Channel& channel, Scheduled& next) = 0;
  // Hands over what is not to run any more.
  virtual Pending take() = 0;
};

// Runs operations in the order in which they were added, which must be the same on all ranks, and
// compares each just before it runs.
std::unique_ptr<Coordinator> make_in_order(Comparison& comparison);

}  // namespace sparsecomm
