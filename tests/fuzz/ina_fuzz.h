// One input of the fuzzer of aggregation messages, shared by libFuzzer and by the replay of its
// corpus. The first byte selects what the rest is taken for; its top bit has checksums repaired.
//
// Anything but a MalformedFrame or what a refusal says is a bug.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "frame_fuzz.h"
#include "ina/aggregator.h"
#include "ina/greeting.h"
#include "ina/host.h"
#include "ina/worker.h"
#include "wire/checksum.h"

namespace sparsecomm::fuzz {

enum class InaTarget : std::uint8_t { opening, refusal, aggregator, worker, host, greeting, count };

// Seven blocks, of which a round reduces three.
inline InaPlan const& ina_plan() {
  static InaPlan const plan{.elements = 100, .block_bytes = 64, .workers = 2, .window = 3};
  return plan;
}

inline void repair_ina(std::span<std::byte> message) {
  if (message.size() < sizeof(InaHeader)) return;
  InaHeader header;
  std::memcpy(&header, message.data(), sizeof(header));
  std::size_t const blocks =
      header.kind == InaKind::refusal
          ? 0
          : static_cast<std::size_t>(std::popcount(header.bitmap)) * ina_plan().block_bytes;
  auto const rest = message.subspan(sizeof(header));
  if (blocks > rest.size()) return;
  header.checksum = 0;
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(&header, 1)));
  checksum.add(rest.first(rest.size() - blocks));
  checksum.add(rest.last(blocks));
  header.checksum = checksum.value();
  std::memcpy(message.data(), &header, sizeof(header));
}

// in: messages, each after its sender (1 byte) and its length (2 bytes).
template <class F>
void for_each_message(std::span<const std::byte> in, bool repaired, F&& f) {
  while (in.size() >= 3) {
    auto const sender = std::uint8_t(in[0]);
    std::uint16_t length;
    std::memcpy(&length, in.data() + 1, 2);
    in = in.subspan(3);
    std::size_t const size = std::min<std::size_t>(length, in.size());
    // Exactly as long as the message, so that a sanitizer sees a read beyond it.
    std::vector<std::byte> message(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(size));
    if (repaired) repair_ina(message);
    f(sender, message);
    in = in.subspan(size);
  }
}

inline void ina_aggregator(std::span<const std::byte> in, bool repaired) {
  TimePoint const now{std::chrono::hours(1)};
  for (CombineOrder const order : {CombineOrder::arrival, CombineOrder::rank}) {
    InaPlan plan = ina_plan();
    plan.order = order;
    InaAggregator aggregator(plan);
    aggregator.start(plan, 1, now, std::chrono::seconds(1));
    for_each_message(in, repaired, [&](std::uint8_t sender, std::vector<std::byte> const& message) {
      BlockList const blocks = aggregator.round_blocks();
      std::uint32_t const round = aggregator.round();
      auto const answer = aggregator.receive(sender % plan.workers, message, now);
      if (!answer) return;
      std::vector<std::byte> bytes;
      for (auto const piece : answer->pieces()) {
        bytes.insert(bytes.end(), piece.begin(), piece.end());
      }
      // Its messages are valid too.
      try {
        if (aggregator.failed()) {
          check(parse_refusal(bytes, 1, plan.workers).text == aggregator.failure(),
                "a refusal says something else");
        } else {
          parse_update(bytes, plan, {.operation = 1, .round = round, .blocks = &blocks});
        }
      } catch (MalformedFrame const& error) {
        check(false, error.what());
      }
    });
  }
}

inline void ina_worker(std::span<const std::byte> in, bool repaired) {
  TimePoint const now{std::chrono::hours(1)};
  std::vector<std::byte> const input(ina_plan().bytes(), std::byte{1});
  std::vector<std::byte> output(input.size());
  InaWorker worker;
  worker.start(ina_plan(), 1, 1, input, output, now, std::chrono::seconds(1));
  bool over = false;
  for_each_message(in, repaired, [&](std::uint8_t, std::vector<std::byte> const& message) {
    if (over) return;
    over = true;  // unless it goes on
    over = !worker.receive(message, now).has_value();
  });
}

// Two connections of a job send, in two instances, while a third waits in another job.
inline void ina_host(std::span<const std::byte> in, bool repaired) {
  struct Silent final : InaHost::Outlet {
    void send(int, std::uint32_t, InaMessage const& message, std::shared_ptr<void const>) override {
      check(message.size() <= most_message_bytes(ina_plan()), "an update that is too long");
    }
    void send_copy(int, std::uint32_t, std::span<const std::byte>) override {}
    void drop(int, InaHost::DropCause, std::string const&) override {}
  };
  TimePoint now{std::chrono::hours(1)};
  constexpr std::size_t memory = 1 << 16;
  Silent outlet;
  InaHost host({.memory = memory, .round = std::chrono::seconds(1)}, outlet);
  for (std::uint16_t i = 0; i < 3; ++i) {
    host.join(i, {.job = {i / 2u, 0}, .workers = 2, .worker = static_cast<std::uint16_t>(i % 2)},
              now);
  }
  for_each_message(in, repaired, [&](std::uint8_t sender, std::vector<std::byte> const& message) {
    int const connection = sender % 2;
    std::uint32_t const instance = sender / 2 % 2;
    auto const begin = std::span(message).first(std::min(message.size(), opening_bytes));
    try {
      auto const place = host.place(connection, instance, message.size(), begin, now);
      if (place.bytes.empty()) return;
      check(place.bytes.size() == message.size(), "a place of another size");
      std::ranges::copy(message, place.bytes.begin());
      host.receive(connection, instance, place.bytes, now);
    } catch (MalformedFrame const& error) {
      host.leave(connection, error.what());
      host.join(connection,
                {.job = {0, 0}, .workers = 2, .worker = static_cast<std::uint16_t>(connection)},
                now);
    }
    check(host.jobs() == 2, "a job has gone");
    now += std::chrono::milliseconds(10);
    host.expire(now);
  });
  for (int i = 0; i < 3; ++i) host.leave(i, "");
  check(host.jobs() == 0 && host.admission().free() == memory, "memory that is not given back");
}

inline void ina_greeting(std::vector<std::byte> in) {
  in.resize(sizeof(InaGreeting));
  auto const bytes = std::span(in).first<sizeof(InaGreeting)>();
  try {
    ParsedGreeting const greeting = parse_greeting(bytes);
    JobMember const& member = greeting.member;
    check(member.worker < member.workers, "a worker that its job does not have");
    auto const again = make_greeting(
        member,
        {.introduction = std::string(greeting.introduction_bytes, 'u'), .token = greeting.token});
    check(std::ranges::equal(std::span(again).first(bytes.size()), bytes),
          "a greeting that changes");
  } catch (MalformedFrame const&) {
  }
  check(parse_answer(bytes.first<sizeof(InaAnswer)>()).text_bytes <= most_answer_text,
        "a text too long");
}

inline void run_ina(std::span<const std::byte> data) {
  if (data.empty()) return;
  auto const selector = std::uint8_t(data[0]);
  bool const repaired = (selector & 0x80u) != 0;
  std::vector<std::byte> in(data.begin() + 1, data.end());
  try {
    switch (InaTarget((selector & 0x7fu) % std::uint8_t(InaTarget::count))) {
      case InaTarget::opening:
        if (repaired) repair_ina(in);
        check(problem(parse_opening(in)).empty(), "a plan that nobody could run");
        return;
      case InaTarget::refusal:
        if (repaired) repair_ina(in);
        parse_refusal(in, 1, 2).raise();
      case InaTarget::aggregator:
        return ina_aggregator(in, repaired);
      case InaTarget::host:
        return ina_host(in, repaired);
      case InaTarget::greeting:
        return ina_greeting(std::move(in));
      default:
        return ina_worker(in, repaired);
    }
  } catch (MalformedFrame const&) {
  } catch (Mismatch const&) {
  } catch (PeerError const&) {
  }
}

}  // namespace sparsecomm::fuzz
