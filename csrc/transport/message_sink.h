// Where messages go that come from one sender, each received to its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/error.h"

namespace sparsecomm {

// How much of a message tells where it is to go.
inline constexpr std::size_t opening_bytes = 64;

class MessageSink {
 public:
  struct Place {
    std::span<std::byte> bytes;          // as long as the message; empty: skip it
    std::shared_ptr<void const> memory;  // held until the bytes have been written
  };
  // The message begins with `begin`: opening_bytes of it, or all if it is shorter. Throws
  // MalformedFrame to end the connection. Others may be placed before this one has come, but those
  // that come at once, as all do over a socket.
  virtual Place place(std::uint32_t instance, std::size_t bytes,
                      std::span<const std::byte> begin) = 0;
  // The message is at its place.
  virtual void take(std::uint32_t instance, std::span<const std::byte> message) = 0;

 protected:
  ~MessageSink() = default;
};

}  // namespace sparsecomm
