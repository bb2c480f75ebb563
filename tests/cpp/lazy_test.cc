// A transport that connects when it is first used is, from then on, what it has connected.
#include "transport/lazy.h"

#include <gtest/gtest.h>

#include "engine/sparse_collectives.h"
#include "ranks.h"
#include "services.h"

namespace sparsecomm::test {
namespace {

// Runs body() over transports that connect with the first message.
std::vector<std::exception_ptr> run_lazily(int size,
                                           std::function<void(Communicator&)> const& body) {
  std::vector<std::unique_ptr<Transport>> lazy;
  for (auto& transport : make_inproc_transports(size)) {
    auto reducing = std::make_shared<std::unique_ptr<Transport>>(
        std::make_unique<ReducingTransport>(std::move(transport)));
    int const rank = (*reducing)->rank();
    lazy.push_back(
        make_lazy_transport(rank, size, [reducing](auto const&) { return std::move(*reducing); }));
  }
  return run_ranks(std::move(lazy), body);
}

class ThreadNoted final : public Operation {
 public:
  Proposal prepare() override { return {.text = "operation=note"}; }
  void run(Channel&, Agreement const&) override { thread = std::this_thread::get_id(); }

  std::thread::id thread;
};

class NeverRaises final : public Interrupt {
 private:
  void check() override {}
};

TEST(LazyTransportTest, TheLibrarysOwnAllreduceIsUsed) {
  expect_no_errors(run_lazily(3, [](Communicator& communicator) {
    EXPECT_EQ(communicator.transport().name(), "unconnected");
    auto const allreduce = std::make_shared<AllreduceOperation<float>>(communicator);
    allreduce->configure(
        {.vector = "test", .extent = 4, .algorithm = find_reducing("dense_inner")});
    std::vector<float> data(4, static_cast<float>(communicator.rank()));
    allreduce->bind(data);
    communicator.run(allreduce);
    EXPECT_EQ(data, std::vector<float>(4, 3.0f));
    EXPECT_EQ(communicator.transport().name(), "inproc");
  }));
}

TEST(LazyTransportTest, ABlockingCallThatCanBeInterruptedRunsInTheCallersThreadOnceConnected) {
  expect_no_errors(run_lazily(2, [](Communicator& communicator) {
    auto const operation = std::make_shared<ThreadNoted>();
    NeverRaises interrupt;
    communicator.run(operation, &interrupt);
    EXPECT_NE(operation->thread, std::this_thread::get_id());  // it may wait long to connect
    // Right after the first one the communicator's thread may not have let go of the transport.
    for (int call = 0; call < 50; ++call) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      communicator.run(operation, &interrupt);
    }
    EXPECT_EQ(operation->thread, std::this_thread::get_id());
  }));
}

}  // namespace
}  // namespace sparsecomm::test
