// Links to services, on which a rank waits as it waits for other ranks.
#pragma once

#include <memory>
#include <vector>

namespace sparsecomm {

// A service that is lost or late accuses no rank: an algorithm completes its operation without it,
// or throws an error that names the service and counts as this rank's own.
class Interruptible {
 public:
  // Ends the wait in progress, if any, and every later one with Interrupted. From any thread.
  virtual void interrupt() noexcept = 0;

 protected:
  ~Interruptible() = default;
};

using Interruptibles = std::vector<std::shared_ptr<Interruptible>>;

}  // namespace sparsecomm
