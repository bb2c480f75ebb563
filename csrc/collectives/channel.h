// One operation's view of a transport: its number, its deadline, and frames instead of bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace sparsecomm {

// The steps of an operation; part of the tag, so that a message can only meet the receive it is
// meant for.
enum class Phase : std::uint8_t {
  agree,
  explain,
  reduce,
  partition,
  threshold,
  balance,
  gather,
  confirm  // the last
};
inline constexpr int phase_bits = 3;
static_assert(static_cast<unsigned>(Phase::confirm) < 1u << phase_bits,
              "Channel::tag() has too few bits for a phase");

class Channel {
 public:
  // As long as it lives, other threads see what this one waits for.
  class Wait {
   public:
    template <class Awaited>
    Wait(Transport& transport, Awaited awaited) : transport_(transport) {
      transport_.begin_wait(awaited);
    }
    ~Wait() { transport_.end_wait(); }
    Wait(Wait const&) = delete;
    Wait& operator=(Wait const&) = delete;

   private:
    Transport& transport_;
  };

  Channel(Transport& transport, std::uint32_t operation, Deadline const& deadline)
      : transport_(transport), operation_(operation), deadline_(deadline) {}

  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  std::uint32_t operation() const { return operation_; }
  // Stamps this operation's frames.
  FrameStamp stamp() const { return {operation_, transport_.run()}; }

  Transport const& transport() const { return transport_; }
  Deadline const& deadline() const { return deadline_; }

  Request isend(int peer, Phase phase, std::span<const std::byte> frames) {
    return transport_.isend(peer, tag(phase), frames);
  }
  Request irecv(int peer, Phase phase, std::span<std::byte> buffer) {
    return transport_.irecv(peer, tag(phase), buffer);
  }
  // For a part that has a deadline of its own.
  Channel under(Deadline const& deadline) const { return {transport_, operation_, deadline}; }
  // Wakes a peer that idles before this operation; see Transport::ring().
  void ring(int peer) { transport_.ring(peer, operation_); }
  // Until a peer rings; see Transport::idle().
  Woken idle(Deadline const& deadline) { return transport_.idle(operation_ - 1, deadline); }
  // See Deadline::postpone.
  void postpone(Duration time) { deadline_.postpone(time); }
  // Around a wait that is not the channel's: for a rank, for everybody, or for a service, whose
  // name stands in reports of stalls.
  [[nodiscard]] Wait waiting_for(int peer) { return {transport_, peer}; }
  [[nodiscard]] Wait waiting_for(std::string_view service) { return {transport_, service}; }
  std::size_t wait(Request& request) {
    Wait const waiting(transport_, request.peer);
    return transport_.wait(request, deadline_);
  }
  void wait_all(std::span<Request> requests);

  // Waits for a message of exactly frames.size() frames and validates each. Throws PeerInvalid,
  // naming the peer and the field, where one is malformed.
  void wait_frames(Request& request, int peer, std::span<const std::byte> buffer,
                   std::span<FrameView> frames);
  FrameView wait_frame(Request& request, int peer, std::span<const std::byte> buffer);

  // Runs decode() and turns a MalformedFrame into PeerInvalid against the rank the frame came from.
  template <class F>
  void decode_from(int peer, F&& decode) {
    try {
      decode();
    } catch (MalformedFrame const& error) {
      blame(peer, error);
    }
  }
  [[noreturn]] void blame(int peer, std::exception const& error) const;

 private:
  // Of operations 2^28 apart or nearly so, which never meet, tags are the same.
  Tag tag(Phase phase) const {
    return (operation_ % (tag_limit >> phase_bits)) << phase_bits | static_cast<Tag>(phase);
  }

  Transport& transport_;
  std::uint32_t operation_;
  Deadline deadline_;
};

}  // namespace sparsecomm
