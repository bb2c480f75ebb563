#include "c10d_rings.h"

#include <ATen/ATen.h>

#include <deque>
#include <exception>
#include <utility>

#include "base/error.h"
#include "transport/transport.h"

namespace sparsecomm {
namespace {

constexpr int ring_tag = tag_limit;

// A peer that is gone hears nothing.
template <class Send>
void unless_gone(Send&& send) {
  try {
    send();
  } catch (std::exception const&) {
    // Whoever next waits for it says so.
  }
}

std::vector<at::Tensor> tensor_of(RingMessage& ring) {
  return {at::from_blob(&ring, {sizeof ring}, at::kByte)};
}

}  // namespace

C10dRings::C10dRings(c10::intrusive_ptr<c10d::Backend> group, std::uint32_t run, Doorbell& doorbell)
    : group_(std::move(group)),
      run_(run),
      doorbell_(doorbell),
      listener_([this] { listen(); }),
      sender_([this] { send(); }) {}

C10dRings::~C10dRings() {
  if (process_ != ::getpid()) {
    listener_.detach();
    sender_.detach();
    return;
  }
  {
    std::lock_guard const lock(mutex_);
    ended_ = true;
    for (auto const& work : {received_, sent_}) {
      if (work) work->abort();
    }
  }
  changed_.notify_all();
  listener_.join();
  sender_.join();
}

void C10dRings::ring(int peer, std::uint32_t number) {
  {
    std::lock_guard const lock(mutex_);
    outgoing_[peer] = number;
  }
  changed_.notify_all();
}

bool C10dRings::await(c10::intrusive_ptr<c10d::Work> const& work,
                      c10::intrusive_ptr<c10d::Work>& awaited) {
  {
    std::lock_guard const lock(mutex_);
    if (ended_) return false;
    awaited = work;
  }
  bool const complete = work->wait(endless);
  std::lock_guard const lock(mutex_);
  awaited.reset();
  return complete;
}

void C10dRings::listen() try {
  for (;;) {
    RingMessage ring;
    std::vector<at::Tensor> tensors = tensor_of(ring);
    auto const work = group_->recvAnysource(tensors, ring_tag);
    if (!await(work, received_)) return;
    doorbell_.ring(number_of(ring, run_, work->sourceRank()));
  }
} catch (PeerInvalid const&) {
  doorbell_.fail(std::current_exception());
} catch (std::exception const& error) {
  doorbell_.fail(std::make_exception_ptr(
      PeerLost(concat("no ring can be heard any more: ", error.what()), {})));
}

void C10dRings::send() {
  struct Sent {
    RingMessage ring;
    c10::intrusive_ptr<c10d::Work> work;
  };
  for (;;) {
    std::deque<Sent> sent;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_ || !outgoing_.empty(); });
      if (ended_) return;
      for (auto const& [peer, number] : std::exchange(outgoing_, {})) {
        Sent& one = sent.emplace_back(Sent{make_ring(run_, number), {}});
        std::vector<at::Tensor> tensors = tensor_of(one.ring);
        unless_gone([&] { one.work = group_->send(tensors, peer, ring_tag); });
      }
    }
    for (Sent const& one : sent) {
      bool ended = false;
      if (one.work) unless_gone([&] { ended = !await(one.work, sent_); });
      if (ended) return;
    }
  }
}

}  // namespace sparsecomm
