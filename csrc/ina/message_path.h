// The way of messages to the other side of a connection and back: its socket, or UCX beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ina/message.h"
#include "ina/message_stream.h"
#include "transport/ucx_messages.h"

namespace sparsecomm {

// How messages are to go over connections that are made.
enum class MessageTransport : std::uint8_t {
  automatic,  // over UCX where both sides can and it has shared memory or RDMA, else TCP
  tcp,
  ucx,  // a connection that cannot is refused
};

// "auto", "tcp" or "ucx"; throws InvalidArgument, naming what the text is of, for anything else.
inline MessageTransport message_transport_named(std::string_view text, std::string_view of) {
  if (text == "auto") return MessageTransport::automatic;
  if (text == "tcp") return MessageTransport::tcp;
  require(text == "ucx", of, " is \"", text, "\", must be auto, tcp or ucx");
  return MessageTransport::ucx;
}

struct MessageOptions {
  MessageTransport transport = MessageTransport::automatic;
  UcxOptions ucx;
};

// For about `connections` at once. Null: no messages go over UCX; if it cannot be used here,
// `why_not` says why. Throws TransportUnavailable then if they must.
std::unique_ptr<UcxMessages> open_ucx_messages(MessageOptions const& options,
                                               std::size_t connections,
                                               std::string* why_not = nullptr);

class MessagePath {
 public:
  // The socket is the owner's, and outlives the path.
  explicit MessagePath(int socket) : stream_(socket) {}
  // From now on, over UCX. The socket stays to tell of the other side's end: UCX may not.
  void use(std::unique_ptr<UcxConnection> ucx) { ucx_ = std::move(ucx); }
  bool over_ucx() const { return ucx_ != nullptr; }

  // Why no more can be sent or received; empty while all is well.
  std::string const& error() const {
    return ucx_ && !ucx_->error().empty() ? ucx_->error() : stream_.error();
  }

  // That is since what the other side has sent is not valid.
  bool malformed() const { return stream_.malformed() || (ucx_ && ucx_->malformed()); }

  // As MessageStream says, and UcxConnection.
  void send(std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> memory = nullptr) {
    if (!ucx_) return stream_.send(instance, message, std::move(memory));
    ucx_->send(instance, message.pieces(), std::move(memory));
  }
  void send_copy(std::uint32_t instance, std::span<const std::byte> message) {
    if (!ucx_) return stream_.send_copy(instance, message);
    ucx_->send_copy(instance, message);
  }
  void flush() { stream_.flush(); }
  bool flushed() const { return ucx_ ? ucx_->flushed() : stream_.flushed(); }

  // Reads from the socket, where no message comes beside UCX.
  bool receive(MessageSink& sink) {
    NoMessage none;
    return stream_.receive(ucx_ ? none : sink);
  }

 private:
  struct NoMessage final : MessageSink {
    Place place(std::uint32_t, std::size_t bytes, std::span<const std::byte>) override {
      throw MalformedFrame(
          concat("aggregation message: length is ", bytes, ", must be none beside UCX"));
    }
    void take(std::uint32_t, std::span<const std::byte>) override {}
  };

  MessageStream stream_;
  std::unique_ptr<UcxConnection> ucx_;
};

}  // namespace sparsecomm
