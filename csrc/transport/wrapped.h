// Transports that stand before another one: what they do not override is done by that one.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>

#include "transport/transport.h"
#include "wire/frame.h"

namespace sparsecomm {

class WrappedTransport : public Transport {
 public:
  explicit WrappedTransport(std::unique_ptr<Transport> inner)
      : Transport(inner->rank(), inner->size()), inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  std::uint32_t run() override { return inner().run(); }
  std::size_t wait(Request& request, Deadline const& deadline) override {
    return inner().wait(request, deadline);
  }
  Woken idle(std::uint32_t heard, Deadline const& deadline) override {
    return inner().idle(heard, deadline);
  }
  void wake() noexcept override { inner_->wake(); }
  bool interruptible() const override { return inner_->interruptible(); }
  NativeAllreduce* native() override { return inner_->native(); }
  void interrupt() noexcept override { inner_->interrupt(); }
  void abort() noexcept override { inner_->abort(); }
  Board& board() override { return inner_->board(); }

 protected:
  // For one that overrides inner(), native() and everything that is const or noexcept.
  WrappedTransport(int rank, int size) : Transport(rank, size) {}

  virtual Transport& inner() { return *inner_; }

  void do_ring(int peer, std::uint32_t number) override { inner().ring(peer, number); }
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    return inner().isend(peer, tag, bytes);
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    return inner().irecv(peer, tag, bytes);
  }

 private:
  std::unique_ptr<Transport> inner_;
};

// Shows the header of every frame that arrives.
class FrameObserver final : public WrappedTransport {
 public:
  using Observe = std::function<void(FrameHeader const&)>;

  FrameObserver(std::unique_ptr<Transport> inner, Observe observe)
      : WrappedTransport(std::move(inner)), observe_(std::move(observe)) {}

  std::size_t wait(Request& request, Deadline const& deadline) override {
    auto const receive = receives_.find(request.slot);
    std::size_t const bytes = WrappedTransport::wait(request, deadline);
    if (receive == receives_.end()) return bytes;
    auto rest = receive->second.first(bytes);
    receives_.erase(receive);
    while (rest.size() >= header_bytes) {
      FrameHeader header;
      std::memcpy(&header, rest.data(), sizeof header);
      observe_(header);
      std::size_t const frame_bytes =
          header_bytes + std::size_t{header.index_bytes} + header.value_bytes;
      rest = rest.subspan(std::min(frame_bytes, rest.size()));
    }
    return bytes;
  }

 protected:
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    Request const request = WrappedTransport::do_irecv(peer, tag, bytes);
    receives_[request.slot] = bytes;
    return request;
  }

 private:
  Observe observe_;
  std::unordered_map<std::uint32_t, std::span<std::byte>> receives_;
};

}  // namespace sparsecomm
