// A transport on its way through Python, from whoever connects it to whoever uses it.
#pragma once

#include <memory>

#include "engine/timeline.h"
#include "interpreter.h"
#include "transport/transport.h"

namespace sparsecomm {

class TransportHolder {
 public:
  TransportHolder(std::unique_ptr<Transport> transport, TimelineOptions timeline)
      : transport_(std::move(transport)), timeline_(std::move(timeline)) {}
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
  // Where whoever takes the transport is to record what it does.
  TimelineOptions const& timeline() const { return timeline_; }
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
  TimelineOptions timeline_;
};

}  // namespace sparsecomm
