// Messages over a connected socket that does not block. Each travels behind an envelope of 8 bytes,
// its length and its instance, little-endian.
//
// Both directions copy nothing but what arrives together with an envelope, and the few messages
// that do not stay. Nothing is allocated for the others once the queue has grown.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ina/block_list.h"
#include "ina/message.h"
#include "ina/plan.h"
#include "transport/message_sink.h"

namespace sparsecomm {

struct InaEnvelope {
  std::uint32_t bytes;
  std::uint32_t instance;
};
static_assert(sizeof(InaEnvelope) == 8);

// No message is longer, whatever the plan.
inline constexpr std::size_t longest_message =
    most_head_bytes(most_blocks) + most_blocks * most_block_bytes;

class MessageStream {
 public:
  // `file` is the owner's, and outlives the stream.
  explicit MessageStream(int file) : file_(file) {}

  // Why no more can be sent or received; empty while all is well.
  std::string const& error() const { return error_; }
  // That is since what the other side has sent is not valid.
  bool malformed() const { return malformed_; }

  // Writes as much as the socket takes; flush() goes on with the rest. The bytes must stay until
  // then; `memory`, if any, is held so long.
  void send(std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> memory = nullptr);
  // Keeps a copy of what the socket does not take. More than most_copied bytes are an error: the
  // other side does not read.
  void send_copy(std::uint32_t instance, std::span<const std::byte> message);
  static constexpr std::size_t most_copied = std::size_t{1} << 16;
  void flush();
  bool flushed() const { return count_ == 0; }

  // Reads on until a message is complete or has been skipped (true), or the socket has no more for
  // now or is broken (false).
  bool receive(MessageSink& sink);

 private:
  struct Outgoing {
    InaEnvelope envelope{};
    InaMessage message;
    std::vector<std::byte> copy;
    std::shared_ptr<void const> memory;
    std::size_t size() const { return sizeof(envelope) + message.size(); }
  };

  Outgoing& append(std::uint32_t instance);
  bool begin_message(MessageSink& sink);
  bool read_some();
  std::span<const std::byte> buffered() const {
    return std::span(buffer_).subspan(begin_, end_ - begin_);
  }

  int file_;
  std::string error_;
  bool malformed_ = false;

  std::vector<Outgoing> queue_;  // a ring
  std::size_t first_ = 0, count_ = 0;
  std::size_t written_ = 0;  // bytes of the first
  std::size_t copied_ = 0;   // bytes that wait in copies

  std::array<std::byte, 4096> buffer_;  // what has been read and is at no place yet
  std::size_t begin_ = 0, end_ = 0;
  bool in_message_ = false;
  std::uint32_t instance_ = 0;
  std::size_t bytes_ = 0, arrived_ = 0;  // of the message
  MessageSink::Place place_;
};

}  // namespace sparsecomm
