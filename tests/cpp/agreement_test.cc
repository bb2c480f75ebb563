// Payloads of proposals are validated and merged alike on all ranks, and an agreement takes no more
// bytes than it may.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "engine/gradient_exchange.h"
#include "engine/sparse_collectives.h"
#include "named_sums.h"
#include "ranks.h"
#include "transport/wrapped.h"

namespace sparsecomm::test {
namespace {

// Tells numbers; merges the first of them.
class Telling final : public Operation {
 public:
  using Merge = bool (*)(std::uint64_t& into, std::uint64_t other);

  Telling(std::string text, std::vector<std::uint64_t> numbers, Merge merge)
      : text_(std::move(text)), numbers_(std::move(numbers)), merge_(merge) {}

  Proposal prepare() override {
    return {.text = text_, .payload = std::as_bytes(std::span(numbers_))};
  }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    std::uint64_t merged = first_of(into);
    bool const agrees = merge_(merged, first_of(other));
    std::memcpy(into.data(), &merged, sizeof merged);
    return agrees;
  }
  std::string changing_fields(std::span<const std::byte> payload) const override {
    return concat(";own=", numbers_.front(), ";merged=", first_of(payload));
  }
  void run(Channel&, Agreement const& agreement) override { told = first_of(agreement.payload); }

  std::uint64_t told = 0;

 private:
  static std::uint64_t first_of(std::span<const std::byte> payload) {
    std::uint64_t first = 0;
    std::memcpy(&first, payload.data(), sizeof first);
    return first;
  }

  std::string text_;
  std::vector<std::uint64_t> numbers_;
  Merge merge_;
};

bool append_digit(std::uint64_t& into, std::uint64_t other) {
  into = 10 * into + other;
  return true;
}

bool keep_first(std::uint64_t& into, std::uint64_t other) {
  if (into == 0) into = other;
  return into == other;
}

TEST(AgreementTest, PayloadsAreMergedInTheOrderOfTheRanksFromZero) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      for (std::uint64_t const first : {1u, 0u}) {
        auto const operation = std::make_shared<Telling>(
            "operation=tell", std::vector{first + communicator.rank()}, append_digit);
        communicator.run(operation);
        std::uint64_t expected = 0;
        for (int rank = 0; rank < ranks; ++rank) append_digit(expected, first + rank);
        EXPECT_EQ(operation->told, expected) << "P=" << ranks;
      }
    }));
  }
}

TEST(AgreementTest, RanksWhosePayloadsDoNotMergeRaiseTheSameMismatchAndGoOn) {
  std::vector<std::string> messages(3);
  expect_no_errors(run_ranks(3, [&](Communicator& communicator) {
    int const rank = communicator.rank();
    auto const run = [&](std::uint64_t number) {
      auto const operation =
          std::make_shared<Telling>("operation=tell", std::vector{number}, keep_first);
      communicator.run(operation);
      return operation->told;
    };
    try {
      run(rank == 1 ? 7 : 5);
    } catch (Mismatch const& error) {
      messages[rank] = error.what();
    }
    EXPECT_EQ(run(6), 6u);
  }));
  EXPECT_EQ(messages, std::vector<std::string>(
                          3,
                          "ranks disagree: own: 5 on ranks 0, 2 but 7 on rank 1; give every rank "
                          "the same, in the same order of calls"));
}

TEST(AgreementTest, PayloadsOfAnotherKeyAreNeitherMergedNorMeasured) {
  expect_no_errors(run_ranks(4, [&](Communicator& communicator) {
    auto const rank = static_cast<std::uint64_t>(communicator.rank());
    std::vector<std::uint64_t> const numbers(1 + rank % 3, 1 + rank);
    auto const operation = std::make_shared<Telling>(
        concat("operation=tell;numbers=", numbers.size()), numbers, append_digit);
    try {
      communicator.run(operation);
      ADD_FAILURE() << "they agreed";
    } catch (Mismatch const& error) {
      std::string_view const text = error.what();
      for (char const* const field : {"numbers: 1 on ranks 0, 3 but 2 on rank 1 but 3 on rank 2",
                                      "merged: 14 on ranks 0, 3 but 2 on rank 1 but 3 on rank 2"}) {
        EXPECT_NE(text.find(field), std::string_view::npos) << text;
      }
    }
  }));
}

TEST(AgreementTest, APayloadThatHasNoRoomFailsBeforeTheExchange) {
  expect_no_errors(run_ranks(2, [&](Communicator& communicator) {
    std::vector<std::uint64_t> const numbers(communicator.rank() == 0 ? 3 : 4, 1);
    auto const operation = std::make_shared<Telling>("operation=tell", numbers, append_digit);
    try {
      communicator.run(operation);
      ADD_FAILURE() << "it was sent";
    } catch (Mismatch const& error) {
      EXPECT_EQ(std::string(error.what()),
                "rank 1 failed before the exchange: a payload of 32 bytes; there is room for 24");
    }
  }));
}

// Changes what a rank says of itself in the first message in which that takes so many bytes.
class Forging final : public WrappedTransport {
 public:
  using Forge = std::function<void(std::vector<std::byte>& fingerprint)>;

  Forging(std::unique_ptr<Transport> inner, std::size_t bytes, Forge forge)
      : WrappedTransport(std::move(inner)), bytes_(bytes), forge_(std::move(forge)) {}

 protected:
  Request do_isend(int peer, Tag tag, std::span<const std::byte> bytes) override {
    FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    if (!first_ || header.value_bytes != bytes_) return inner().isend(peer, tag, bytes);
    first_ = false;
    auto const values = bytes.subspan(header_bytes, header.value_bytes);
    std::vector<std::byte> fingerprint(values.begin(), values.end());
    forge_(fingerprint);
    message_.resize(header_bytes + fingerprint.size());
    encode_bytes({header.operation, run()}, fingerprint, message_);
    auto const rest = bytes.subspan(header_bytes + values.size());
    message_.insert(message_.end(), rest.begin(), rest.end());
    return inner().isend(peer, tag, message_);
  }

 private:
  std::size_t bytes_;
  Forge forge_;
  bool first_ = true;
  std::vector<std::byte> message_;  // until the inner transport has been waited for
};

constexpr std::size_t fingerprint_bytes = 24;

// Expects every rank to name rank 1 of three, which forges its fingerprint of a gradient's
// exchange, and to keep gradient and residual.
void expect_forgery_named(Forging::Forge const& forge, std::string const& reason) {
  SCOPED_TRACE(reason);
  constexpr std::size_t extent = 100;
  auto transports = make_inproc_transports(3);
  transports[1] = std::make_unique<Forging>(std::move(transports[1]),
                                            fingerprint_bytes + sizeof(StepPayload), forge);
  auto const errors = run_ranks(std::move(transports), [&](Communicator& communicator) {
    auto const exchange =
        std::make_shared<GradientExchange<float>>("test", extent, ExchangeOptions{}, communicator);
    std::vector<float> gradient(extent, 1.0f), residual(extent, 0.5f);
    exchange->bind({{gradient, residual}});
    try {
      communicator.run(exchange);
    } catch (...) {
      for (std::size_t i = 0; i < extent; ++i) EXPECT_EQ(gradient[i] + residual[i], 1.5f) << i;
      throw;
    }
  });
  for (std::exception_ptr const& error : errors) {
    std::string const text = message_of(error);
    EXPECT_TRUE(text.starts_with("rank 1 broke the exchange: rank 1 sent an invalid message: "))
        << text;
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  }
}

template <class F>
Forging::Forge with_payload(F change) {
  return [=](std::vector<std::byte>& fingerprint) {
    auto const bytes = std::span(fingerprint).last(sizeof(StepPayload));
    auto payload = read_payload<StepPayload>(bytes);
    change(payload);
    std::ranges::copy(payload_of(payload), bytes.begin());
  };
}

TEST(AgreementTest, NumbersThatNoRankCanHaveAreHeldAgainstTheirs) {
  for (float const seconds :
       {std::numeric_limits<float>::quiet_NaN(), -1.0f, std::numeric_limits<float>::infinity()}) {
    expect_forgery_named(with_payload([=](auto& payload) { payload.previous_seconds = seconds; }),
                         concat("a previous step of ", seconds, " s"));
  }
  for (std::uint32_t const entries : {101u, UINT32_MAX}) {
    expect_forgery_named(with_payload([=](auto& payload) { payload.previous_entries = entries; }),
                         concat("a contribution of ", entries, " entries to a vector of 100"));
  }
  for (double const scale :
       {std::numeric_limits<double>::quiet_NaN(), -2.0, std::numeric_limits<double>::infinity()}) {
    expect_forgery_named(with_payload([=](auto& payload) { payload.loss_scale = {scale}; }),
                         concat("a loss scale of ", scale));
  }
}

TEST(AgreementTest, AFingerprintOfAnotherSizeIsHeldAgainstItsRank) {
  std::size_t const whole = fingerprint_bytes + sizeof(StepPayload);
  for (std::size_t const size : {std::size_t{0}, std::size_t{8}, std::size_t{23}}) {
    expect_forgery_named([=](auto& fingerprint) { fingerprint.resize(size); },
                         concat("a fingerprint of ", size, " bytes"));
  }
  for (std::size_t const size : {fingerprint_bytes, whole - 1, whole + 1, whole + 8}) {
    expect_forgery_named([=](auto& fingerprint) { fingerprint.resize(size); },
                         concat("a payload of ", size - fingerprint_bytes, " bytes instead of ",
                                sizeof(StepPayload)));
  }
  for (std::size_t const size : {whole + 9, std::size_t{5000}}) {  // there is room for 24 + 24
    expect_forgery_named([=](auto& fingerprint) { fingerprint.resize(size); }, "");
  }
}

// Of one known operation, with flags and digests.
constexpr std::size_t standings_bytes = 24;

// Of three ranks that have told numbers twice, and tell them together with their standings.
std::vector<std::exception_ptr> tell_known_numbers(Forging::Forge const& forge) {
  auto transports = make_inproc_transports(3);
  // Together with the number of their operation.
  std::size_t const bytes = standings_bytes + sizeof(std::uint32_t) + sizeof(std::uint64_t);
  transports[1] = std::make_unique<Forging>(std::move(transports[1]), bytes, forge);
  return run_ranks(std::move(transports), [&](Communicator& communicator) {
    int const rank = communicator.rank();
    for (std::uint64_t first = 1; first <= 4; ++first) {
      auto const operation =
          std::make_shared<Telling>("operation=tell", std::vector{first + rank}, append_digit);
      communicator.run(operation);
    }
  });
}

TEST(AgreementTest, StandingsAndPayloadsOfAnotherSizeAreHeldAgainstTheirRank) {
  for (auto const& [size, reason] : {std::pair{std::size_t{23}, "standings of 23 bytes"},
                                     std::pair{std::size_t{35}, "payloads of 7 bytes"},
                                     std::pair{std::size_t{44}, "payloads of 16 bytes"}}) {
    auto const errors = tell_known_numbers([size = size](auto& message) { message.resize(size); });
    for (std::exception_ptr const& error : errors) {
      std::string const text = message_of(error);
      EXPECT_NE(text.find(concat("rank 1 sent an invalid message: ", reason)), std::string::npos)
          << text;
    }
  }
}

// Counts what its rank has received when the agreement is done.
template <class Inner>
class Counting final : public Operation {
 public:
  explicit Counting(std::shared_ptr<Inner> inner) : inner_(std::move(inner)) {}
  Proposal prepare() override { return inner_->prepare(); }
  bool merge(std::span<std::byte> into, std::span<const std::byte> other) const override {
    return inner_->merge(into, other);
  }
  void run(Channel& channel, Agreement const& agreement) override {
    received = Counters::total(channel.transport().counters().received_bytes);
    messages = Counters::total(channel.transport().counters().sent_messages);
    inner_->run(channel, agreement);
  }
  Batch const* batch() const override { return inner_->batch(); }
  void roll_back() noexcept override { inner_->roll_back(); }

  std::uint64_t received = 0, messages = 0;

 private:
  std::shared_ptr<Inner> inner_;
};

TEST(AgreementTest, OfWhatIsKnownTakesTheMessagesAndBytesOfTheFormula) {
  for (int const ranks : {1, 2, 3, 4, 7, 8}) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      auto const expect = [&](auto operation, auto const& bind, std::size_t payload) {
        auto const counting =
            std::make_shared<Counting<typename decltype(operation)::element_type>>(operation);
        for (int known = 0; known < 2; ++known) {
          bind();
          communicator.run(counting);
        }
        Counters const before = communicator.counters();
        bind();
        communicator.run(counting);
        std::uint64_t const received = counting->received - Counters::total(before.received_bytes);
        Cost const cost = agreement_cost(ranks, payload);
        EXPECT_EQ(received, cost.bytes) << "P=" << ranks;
        EXPECT_EQ(counting->messages - Counters::total(before.sent_messages), cost.messages);
      };
      auto const exchange =
          std::make_shared<GradientExchange<float>>("test", 1000, ExchangeOptions{}, communicator);
      std::vector<float> gradient(1000, 1.0f), residual(1000, 0.0f);
      expect(exchange, [&] { exchange->bind({{gradient, residual}}); }, 0);
      auto const allreduce = std::make_shared<AllreduceOperation<float>>(communicator);
      allreduce->configure({.vector = "test", .extent = 1000, .algorithm = find_reducing("dense")});
      expect(allreduce, [&] { allreduce->bind(gradient); }, sizeof(EntryCounts));
      expect(
          std::make_shared<Telling>("operation=tell", std::vector<std::uint64_t>(3),
                                    [](std::uint64_t&, std::uint64_t) { return true; }),
          [] {}, 24);
    }));
  }
}

// As a step of one planned group, which another operation ends.
TEST(AgreementTest, APayloadGoesWithTheStandingsAlsoAfterAnOperationThatHasNone) {
  for (int const ranks : {2, 5}) {
    expect_no_errors(run_ranks(ranks, [&](Communicator& communicator) {
      Counters before(ranks), told(ranks);
      for (int step = 0; step < 4; ++step) {
        before = communicator.counters();
        communicator.run(std::make_shared<Telling>("operation=tell", std::vector<std::uint64_t>(1),
                                                   append_digit));
        told = communicator.counters();
        communicator.run(std::make_shared<Quiet>("end"));
      }
      EXPECT_EQ(Counters::total(difference(told, before).sent_messages),
                agreement_cost(ranks, sizeof(std::uint64_t)).messages);
    }));
  }
}

}  // namespace
}  // namespace sparsecomm::test
