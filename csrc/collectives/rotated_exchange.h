// The exchange of a reduce-scatter: each rank sends one frame to each other rank, in rotated order
// (Ok-Topk section 3.1.1, Figure 2b), and reduces what arrives while more is in flight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "collectives/channel.h"
#include "collectives/patterns.h"

namespace sparsecomm {

class RotatedExchange {
 public:
  // The memory of the messages, which stays the exchange's until finish() returns.
  struct Messages {
    std::span<std::byte> outgoing;  // for all frames that are sent
    std::span<std::byte> incoming;  // as many receives are posted as there is room for
    std::size_t max_frame;          // bounds a frame that is received
    int sends;                      // posted at once
  };

  // The messages to post so that one window of them is reduced while the next arrives.
  static int two_windows(int window, int ranks) {
    return std::min(2 * std::min(window, ranks), ranks - 1);
  }

  // Posts the first messages. encode(destination, room) writes a frame to the front of `room` and
  // returns it.
  template <class Encode>
  void start(Channel& channel, Messages const& messages, Encode&& encode) {
    messages_ = messages;
    sends_.clear();
    receives_.assign(channel.size(), {});
    for (int step = 1; step <= slots(); ++step) post_receive(channel, step);
    for (int step = 1; step <= messages_.sends; ++step) post_send(channel, step, encode);
  }
  // Calls consume(source, frame) for one frame after the other, each while the messages of the
  // steps behind it are posted. A frame is valid until consume() returns.
  template <class Encode, class Consume>
  void finish(Channel& channel, Encode&& encode, Consume&& consume) {
    for (int step = 1; step < channel.size(); ++step) {
      int const source = rotated_source(channel.rank(), step, channel.size());
      consume(source, channel.wait_frame(receives_[step], source, slot(step)));
      post_receive(channel, step + slots());
      post_send(channel, step + messages_.sends, encode);
    }
    channel.wait_all(sends_);
  }
  template <class Encode, class Consume>
  void run(Channel& channel, Messages const& messages, Encode&& encode, Consume&& consume) {
    start(channel, messages, encode);
    finish(channel, encode, consume);
  }

 private:
  int slots() const { return static_cast<int>(messages_.incoming.size() / messages_.max_frame); }
  std::span<std::byte> slot(int step) const {
    return messages_.incoming.subspan(step % slots() * messages_.max_frame, messages_.max_frame);
  }
  void post_receive(Channel& channel, int step) {
    if (step >= channel.size()) return;
    int const source = rotated_source(channel.rank(), step, channel.size());
    receives_[step] = channel.irecv(source, Phase::reduce, slot(step));
  }
  template <class Encode>
  void post_send(Channel& channel, int step, Encode&& encode) {
    if (step >= channel.size()) return;
    int const destination = rotated_destination(channel.rank(), step, channel.size());
    std::span<const std::byte> const frame = encode(destination, messages_.outgoing);
    messages_.outgoing = messages_.outgoing.subspan(frame.size());
    sends_.push_back(channel.isend(destination, Phase::reduce, frame));
  }

  Messages messages_{};
  std::vector<Request> sends_, receives_;
};

}  // namespace sparsecomm
