// What a rank may wait for beside other ranks.
#pragma once

namespace sparsecomm {

class Interruptible {
 public:
  // Ends the wait in progress, if any, and every later one with Interrupted. From any thread.
  virtual void interrupt() noexcept = 0;

 protected:
  ~Interruptible() = default;
};

}  // namespace sparsecomm
