// What every transport promises of Transport::ring(), checked by all of its ranks together.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "base/runtime.h"
#include "patience.h"
#include "transport/transport.h"

namespace sparsecomm::test {

// A dissemination barrier, so that nobody is a round ahead.
inline void meet(Transport& transport, Tag tag, Clock const& clock) {
  int const size = transport.size();
  Deadline const deadline(clock, long_time());
  for (int distance = 1; distance < size; distance *= 2) {
    std::array<std::byte, 1> in{}, out{};
    Request receive = transport.irecv((transport.rank() - distance + size) % size, tag, in);
    Request send = transport.isend((transport.rank() + distance) % size, tag, out);
    transport.wait(receive, deadline);
    transport.wait(send, deadline);
  }
}

inline void ring_partners(Transport& transport, std::uint32_t number) {
  for (int distance = 1; distance < transport.size(); distance *= 2) {
    transport.ring((transport.rank() + distance) % transport.size(), number);
  }
}

// `clock`: of the deadlines; `runtime`: of a thread that it starts. `late`: how long it idles where
// nobody rings.
inline void check_rings(Transport& transport, Clock const& clock = steady_clock(),
                        Runtime runtime = {}, Duration late = std::chrono::milliseconds(20)) {
  Deadline const deadline(clock, long_time());
  int const rank = transport.rank();
  int const size = transport.size();
  auto const idle = [&](std::uint32_t heard, Duration time) {
    return transport.idle(heard, Deadline(clock, time));
  };

  // One rank rings, whoever hears it goes on to ring, and all are woken. Numbers wrap around.
  std::uint32_t number = 0xfffffff0u;
  for (int round = 0; round < 32 && size > 1; ++round) {
    if (rank != round % size) {
      ASSERT_EQ(transport.idle(number, deadline), Woken::rung) << round;
    }
    ring_partners(transport, ++number);
    meet(transport, 1, clock);
  }
  // What rings late, in rounds that are over, wakes nobody.
  ASSERT_EQ(idle(number, late), Woken::late);
  meet(transport, 2, clock);

  // A ring is heard whether it comes before its rank idles or after.
  if (size > 1) {
    ++number;
    if (rank == 0) {
      ring_partners(transport, number);
      meet(transport, 3, clock);
    } else {
      meet(transport, 3, clock);
      if (rank == 1) {
        ASSERT_EQ(transport.idle(number - 1, deadline), Woken::rung);
        ASSERT_EQ(transport.idle(number - 1, deadline), Woken::rung) << "it goes on being above";
      }
    }
  }

  // Only others can be rung.
  EXPECT_THROW(transport.ring(rank, number), InvalidArgument);
  EXPECT_THROW(transport.ring(size, number), InvalidArgument);
  EXPECT_THROW(transport.ring(-1, number), InvalidArgument);

  // wake() ends one idle(), the next one if there is none now.
  transport.wake();
  transport.wake();
  ASSERT_EQ(idle(number, long_time()), Woken::woken);
  ASSERT_EQ(idle(number, Duration::zero()), Woken::late);
  std::thread waker = runtime.start("a waker", [&] {
    runtime.sleep(late);
    transport.wake();
  });
  EXPECT_EQ(idle(number, long_time()), Woken::woken);
  runtime.join(waker);
  meet(transport, 4, clock);

  // Messages and rings do not get into each other's way.
  if (size > 1) {
    ++number;
    std::array<std::byte, 1> in{};
    std::array<std::byte, 1> const out{static_cast<std::byte>(rank)};
    int const before = (rank + size - 1) % size;
    Request receive = transport.irecv(before, 5, in);
    Request send = transport.isend((rank + 1) % size, 5, out);
    ring_partners(transport, number);
    ASSERT_EQ(transport.idle(number - 1, deadline), Woken::rung);
    transport.wait(receive, deadline);
    transport.wait(send, deadline);
    EXPECT_EQ(in[0], static_cast<std::byte>(before));
  }

  // What the caller of an operation is interrupted by ends it as it ends a wait.
  class Raise final : public Interrupt {
    void check() override { throw InvalidArgument("a signal, say"); }
  } raise;
  if (transport.interruptible()) {
    EXPECT_THROW(transport.idle(number, Deadline(clock, long_time(), &raise)), InvalidArgument);
  }
  meet(transport, 6, clock);

  // An interrupt from another thread ends it for good, whatever has come.
  std::thread breaker = runtime.start("a breaker", [&] {
    runtime.sleep(late);
    transport.interrupt();
  });
  EXPECT_THROW(idle(number, long_time()), Interrupted);
  runtime.join(breaker);
  transport.wake();
  EXPECT_THROW(idle(number - 1, long_time()), Interrupted);
  if (size > 1) {
    EXPECT_THROW(transport.ring((rank + 1) % size, number), Interrupted);
  }
}

}  // namespace sparsecomm::test
