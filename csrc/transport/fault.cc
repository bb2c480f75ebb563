#include "transport/fault.h"

#include <atomic>
#include <utility>

#include "transport/wrapped.h"

namespace sparsecomm {
namespace {

// Stops writing and deciding once its rank has died.
class MortalBoard final : public Board {
 public:
  explicit MortalBoard(Board& inner) : inner_(inner) {}
  void die() { died_ = true; }

  bool post_failure(FailureReport const& report) noexcept override {
    return !died_ && inner_.post_failure(report);
  }
  std::vector<std::optional<FailureReport>> failures() override { return inner_.failures(); }
  Duration patience() const override { return inner_.patience(); }
  void on_failure(std::function<void()> const& alarm) override { inner_.on_failure(alarm); }
  std::string decide(std::string const& proposal) override {
    return died_ ? proposal : inner_.decide(proposal);
  }
  std::optional<std::string> decision() override {
    return died_ ? std::nullopt : inner_.decision();
  }
  void post_status(std::string_view status) noexcept override { inner_.post_status(status); }
  std::vector<std::string> statuses() override { return inner_.statuses(); }

 private:
  Board& inner_;
  std::atomic<bool> died_ = false;
};

class FaultyTransport final : public WrappedTransport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, Fault fault)
      : WrappedTransport(std::move(inner)),
        fault_(fault),
        board_(WrappedTransport::inner().board()) {}

  std::size_t wait(Request& request, Deadline const& deadline) override {
    if (request.slot != swallowed) return inner().wait(request, deadline);
    request = {};
    return 0;
  }
  Board& board() override { return board_; }

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    std::uint64_t const message = sent_++;
    if (fault_.kind == FaultKind::delay && message >= fault_.message) return {swallowed};
    if (message != fault_.message) return inner().isend(peer, tag, bytes);
    if (fault_.kind == FaultKind::die) {
      board_.die();
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
  MortalBoard board_;
  std::vector<std::vector<std::byte>> damaged_;  // the inner transport reads them until its wait()
};

}  // namespace

std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, Fault fault) {
  return std::make_unique<FaultyTransport>(std::move(inner), fault);
}

}  // namespace sparsecomm
