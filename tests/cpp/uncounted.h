// Transports whose allocations are not counted, see allocations.h.
#pragma once

#include <cstddef>
#include <span>

#include "allocations.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {

// Does not count what the mailboxes of inproc allocate.
class UncountedTransport final : public WrappedTransport {
 public:
  using WrappedTransport::WrappedTransport;
  std::size_t wait(Request& request, Deadline const& deadline) override {
    Uncounted const uncounted;
    return WrappedTransport::wait(request, deadline);
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    Uncounted const uncounted;
    return WrappedTransport::do_isend(peer, tag, bytes);
  }
  Request do_irecv(int peer, Tag tag, std::span<std::byte> bytes) override {
    Uncounted const uncounted;
    return WrappedTransport::do_irecv(peer, tag, bytes);
  }
};

}  // namespace sparsecomm::test
