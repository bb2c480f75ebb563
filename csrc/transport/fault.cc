#include "transport/fault.h"

#include <utility>

#include "transport/wrapped.h"

namespace sparsecomm {
namespace {

class FaultyTransport final : public WrappedTransport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, Fault fault)
      : WrappedTransport(std::move(inner)), fault_(fault) {}

  std::size_t wait(Request& request, Deadline const& deadline) override {
    if (request.slot != swallowed) return inner().wait(request, deadline);
    request = {};
    return 0;
  }
  void post_failure(FailureReport const& report) noexcept override {
    if (!died_) inner().post_failure(report);
  }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    std::uint64_t const message = sent_++;
    if (fault_.kind == FaultKind::delay && message >= fault_.message) return {swallowed};
    if (message != fault_.message) return inner().isend(peer, tag, bytes);
    if (fault_.kind == FaultKind::die) {
      died_ = true;
      abort();
      throw Died(concat("rank ", rank(), " was told to die at message ", message));
    }
    std::vector<std::byte> damaged(bytes.begin(), bytes.end());
    if (fault_.kind == FaultKind::truncate) {
      damaged.resize(damaged.size() / 2);
    } else if (!damaged.empty()) {
      damaged[damaged.size() / 2] ^= std::byte{0x10};
    }
    Request request = inner().isend(peer, tag, damaged);
    damaged_.push_back(std::move(damaged));
    return request;
  }

 private:
  static constexpr std::uint32_t swallowed = UINT32_MAX - 1;

  Fault fault_;
  std::uint64_t sent_ = 0;
  bool died_ = false;
  std::vector<std::vector<std::byte>> damaged_;  // the inner transport reads them until its wait()
};

}  // namespace

std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, Fault fault) {
  return std::make_unique<FaultyTransport>(std::move(inner), fault);
}

}  // namespace sparsecomm
