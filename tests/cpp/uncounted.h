// Transports whose allocations are not counted, see allocations.h.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "allocations.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {

// Does not count what the mailboxes of inproc allocate.
class UncountedTransport final : public WrappedTransport {
 public:
  using WrappedTransport::WrappedTransport;
  std::size_t wait(Request& request, Deadline const& deadline) override {
    bool const before = std::exchange(counting, false);
    std::size_t const bytes = WrappedTransport::wait(request, deadline);
    counting = before;
    return bytes;
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    bool const before = std::exchange(counting, false);
    Request const request = WrappedTransport::do_isend(peer, tag, bytes);
    counting = before;
    return request;
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    bool const before = std::exchange(counting, false);
    Request const request = WrappedTransport::do_irecv(peer, tag, bytes);
    counting = before;
    return request;
  }
};

}  // namespace sparsecomm::test
