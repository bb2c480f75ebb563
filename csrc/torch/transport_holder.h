// A transport on its way through Python, from whoever connects it to whoever uses it.
#pragma once

#include <memory>

#include "interpreter.h"
#include "transport/transport.h"

namespace sparsecomm {

class TransportHolder {
 public:
  explicit TransportHolder(std::unique_ptr<Transport> transport)
      : transport_(std::move(transport)) {}
  TransportHolder(TransportHolder&&) = default;
  TransportHolder& operator=(TransportHolder&&) = delete;
  // Closing connections may wait for the other ranks.
  ~TransportHolder() {
    if (transport_ == nullptr) return;
    InterpreterRelease const release;
    transport_.reset();
  }

  Transport const& get() const { return checked(); }
  Transport& use() { return checked(); }
  std::unique_ptr<Transport> take() {
    checked();
    return std::move(transport_);
  }

 private:
  Transport& checked() const {
    require(transport_ != nullptr, "this transport is in use already; connect another one");
    return *transport_;
  }
  std::unique_ptr<Transport> transport_;
};

}  // namespace sparsecomm
