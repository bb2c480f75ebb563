#include "c10d_rings.h"

#include <ATen/ATen.h>

#include <deque>
#include <exception>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/transport.h"

namespace sparsecomm {
namespace {

constexpr int ring_tag = tag_limit;

std::vector<at::Tensor> tensor_of(RingMessage& ring) {
  return {at::from_blob(&ring, {sizeof ring}, at::kByte)};
}

}  // namespace

struct C10dRings::Sent {
  RingMessage ring;
  Work work;
};

C10dRings::C10dRings(c10::intrusive_ptr<c10d::Backend> group, std::uint32_t run, Doorbell& doorbell,
                     std::mutex& posting)
    : group_(std::move(group)), run_(run), doorbell_(doorbell), posting_(posting) {
  try {
    listener_ = std::thread([this] { listen(); });
    sender_ = std::thread([this] { send(); });
  } catch (...) {
    end();
    throw;
  }
}

C10dRings::~C10dRings() { end(); }

void C10dRings::end() noexcept {
  {
    std::lock_guard const lock(mutex_);
    ended_ = true;
    for (Work const& work : {received_, sent_}) {
      if (work) work->abort();
    }
  }
  changed_.notify_all();
  for (std::thread* const thread : {&listener_, &sender_}) {
    if (thread->joinable()) thread->join();
  }
}

void C10dRings::ring(int peer, std::uint32_t number) {
  {
    std::lock_guard const lock(mutex_);
    outgoing_[peer] = number;
    // A peer that does not take its ring does not hold up others'.
    if (sent_) sent_->abort();
  }
  changed_.notify_all();
}

bool C10dRings::await(Work const& work, Work& awaited) {
  {
    std::lock_guard const lock(mutex_);
    if (ended_) return false;
    awaited = work;
  }
  struct Over {
    C10dRings& rings;
    Work& awaited;
    ~Over() {
      std::lock_guard const lock(rings.mutex_);
      awaited.reset();
    }
  } const over{*this, awaited};
  return work->wait(endless);
}

void C10dRings::listen() try {
  for (;;) {
    RingMessage ring;
    std::vector<at::Tensor> tensors = tensor_of(ring);
    Work work;
    {
      std::lock_guard const lock(posting_);
      work = group_->recvAnysource(tensors, ring_tag);
    }
    if (!await(work, received_)) return;
    if (auto const number = number_of(ring, run_, work->sourceRank())) doorbell_.ring(*number);
  }
} catch (PeerInvalid const&) {
  doorbell_.fail(std::current_exception());
} catch (std::exception const& error) {
  std::vector<int> peers;  // gloo does not say whose connection broke
  for (int peer = 0; peer < group_->getSize(); ++peer) {
    if (peer != group_->getRank()) peers.push_back(peer);
  }
  std::string const text = concat("rings cannot be received any more: ", error.what());
  doorbell_.fail(std::make_exception_ptr(PeerLost(text, std::move(peers))));
}

void C10dRings::send() try {
  std::deque<Sent> under_way;
  for (;;) {
    std::map<int, std::uint32_t> fresh;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_ || !outgoing_.empty() || !under_way.empty(); });
      if (ended_) return;
      fresh.swap(outgoing_);
    }
    for (auto const& [peer, number] : fresh) {
      Sent& sent = under_way.emplace_back(Sent{make_ring(run_, number), {}});
      std::vector<at::Tensor> tensors = tensor_of(sent.ring);
      try {
        std::lock_guard const lock(posting_);
        sent.work = group_->send(tensors, peer, ring_tag);
      } catch (std::exception const&) {
        under_way.pop_back();  // a peer that is gone hears nothing
      }
    }
    if (under_way.empty()) continue;
    bool over = true;
    try {
      over = await(under_way.front().work, sent_);
    } catch (std::exception const&) {
      // Likewise.
    }
    if (over) under_way.pop_front();
  }
} catch (std::exception const&) {
  doorbell_.fail(std::current_exception());
}

}  // namespace sparsecomm
