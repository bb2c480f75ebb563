// Fault injection: a transport that misbehaves at one chosen message. For tests of everything above
// it.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace sparsecomm {

enum class FaultKind : std::uint8_t {
  die,       // the rank is gone before the message leaves
  delay,     // the message, and all after it, never leave, while the rank lives on
  truncate,  // the second half of the message is missing
  corrupt,   // one bit of the message is flipped
};

struct Fault {
  FaultKind kind = FaultKind::die;
  std::uint64_t message = 0;  // which of the rank's sends, counted from 0
};

// Thrown on the rank that a Fault{die} kills.
class Died : public Error {
 public:
  using Error::Error;
};

// Takes over `inner` and behaves like it but for the one fault.
std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, Fault fault);

}  // namespace sparsecomm
