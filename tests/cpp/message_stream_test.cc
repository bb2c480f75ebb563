// Messages arrive whole and in order however the socket cuts them.
#include "ina/message_stream.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "ina_run.h"
#include "transport/process.h"

namespace sparsecomm::test {
namespace {

class Pair {
 public:
  Pair() {
    int files[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, files), 0);
    a = FileDescriptor(files[0]);
    b = FileDescriptor(files[1]);
    int const small = 5000;  // so that writes and reads are cut
    ::setsockopt(files[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  }
  FileDescriptor a, b;
};

class Collector final : public MessageSink {
 public:
  Place place(std::uint32_t instance, std::size_t bytes,
              std::span<const std::byte> begin) override {
    EXPECT_EQ(begin.size(), std::min(bytes, opening_bytes));
    begins.emplace_back(begin.begin(), begin.end());
    if (instance == skipped) return {};
    buffer.assign(bytes, std::byte{0});
    return {buffer, nullptr};
  }
  void take(std::uint32_t instance, std::span<const std::byte> message) override {
    messages.emplace_back(instance, Bytes(message.begin(), message.end()));
    EXPECT_TRUE(std::ranges::equal(begins.back(), message.first(begins.back().size())));
  }

  std::uint32_t skipped = 1000;
  Bytes buffer;
  std::vector<Bytes> begins;
  std::vector<std::pair<std::uint32_t, Bytes>> messages;
};

Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// In up to three pieces.
InaMessage in_pieces(Bytes const& bytes, std::mt19937_64& random) {
  std::size_t const first = random() % bytes.size();
  std::size_t const second = first + random() % (bytes.size() - first);
  auto const all = std::span(bytes);
  InaMessage message;
  message.add(all.first(first));
  message.add(all.subspan(first, second - first));
  message.add(all.subspan(second));
  return message;
}

TEST(MessageStream, MessagesArriveWholeAndInOrder) {
  std::mt19937_64 random(3);
  Pair pair;
  MessageStream from(pair.a.get());
  MessageStream to(pair.b.get());
  Collector collector;
  collector.skipped = 5;
  std::vector<std::pair<std::uint32_t, Bytes>> expected;
  std::vector<Bytes> sent(600);
  std::size_t placed = 0;
  auto const memory = std::make_shared<int>(0);
  for (std::size_t i = 0; i < sent.size(); ++i) {
    std::size_t const size =
        sizeof(InaHeader) + (i % 3 == 0 ? random() % 40 : random() % (i % 7 == 0 ? 90000 : 5000));
    sent[i] = random_bytes(size, random);
    auto const instance = static_cast<std::uint32_t>(random() % 8);
    ++placed;
    if (instance != collector.skipped) expected.emplace_back(instance, sent[i]);
    if (size < 500) {
      Bytes copy = sent[i];
      from.send_copy(instance, copy);
      std::ranges::fill(copy, std::byte{0});
    } else {
      from.send(instance, in_pieces(sent[i], random), memory);
    }
    while (random() % 3 == 0 && to.receive(collector)) {
    }
    if (random() % 2 == 0) from.flush();
  }
  while (!from.flushed() || collector.messages.size() < expected.size()) {
    from.flush();
    to.receive(collector);
    ASSERT_TRUE(from.error().empty()) << from.error();
    ASSERT_TRUE(to.error().empty()) << to.error();
  }
  EXPECT_EQ(memory.use_count(), 1) << "let go once the bytes are on their way";
  while (to.receive(collector)) {
  }
  EXPECT_EQ(collector.begins.size(), placed);
  EXPECT_TRUE(collector.messages == expected);
}

// Each edge is told once: what comes with it, or before it is looked at, must be found.
TEST(MessageStream, WhatComesAfterAMessageIsFoundWithoutAnotherEdge) {
  std::mt19937_64 random(5);
  Pair pair;
  MessageStream from(pair.a.get());
  MessageStream to(pair.b.get());
  Collector collector;
  Bytes const bytes = random_bytes(200, random);
  from.send(1, in_pieces(bytes, random));
  EXPECT_TRUE(to.receive(collector));
  from.send(2, in_pieces(bytes, random));
  EXPECT_TRUE(to.receive(collector));
  from.send(3, in_pieces(bytes, random));
  pair.a = FileDescriptor();
  EXPECT_TRUE(to.receive(collector));
  EXPECT_FALSE(to.receive(collector));
  EXPECT_FALSE(to.error().empty());
  EXPECT_EQ(collector.messages.size(), 3u);
}

TEST(MessageStream, ASkippedMessageEndsATurn) {
  std::mt19937_64 random(6);
  Pair pair;
  MessageStream from(pair.a.get());
  MessageStream to(pair.b.get());
  Collector collector;
  collector.skipped = 5;
  Bytes const bytes = random_bytes(200, random);
  for (int i = 0; i < 3; ++i) from.send(5, in_pieces(bytes, random));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(collector.begins.size(), std::size_t(i));
    EXPECT_TRUE(to.receive(collector));
  }
  EXPECT_FALSE(to.receive(collector));
  EXPECT_TRUE(collector.messages.empty());
}

TEST(MessageStream, LengthsThatNoMessageHasEndIt) {
  for (std::uint32_t const bytes : {std::uint32_t{0}, std::uint32_t(sizeof(InaHeader) - 1),
                                    std::uint32_t(longest_message + 1), ~std::uint32_t{0}}) {
    Pair pair;
    InaEnvelope const envelope{bytes, 0};
    ASSERT_EQ(::write(pair.a.get(), &envelope, sizeof(envelope)), ssize_t(sizeof(envelope)));
    MessageStream to(pair.b.get());
    Collector collector;
    EXPECT_FALSE(to.receive(collector));
    EXPECT_NE(to.error().find(std::to_string(bytes)), std::string::npos) << to.error();
    EXPECT_TRUE(collector.begins.empty());
  }
}

TEST(MessageStream, TheOthersEndIsNoticedByBoth) {
  Pair pair;
  MessageStream stream(pair.b.get());
  Collector collector;
  EXPECT_FALSE(stream.receive(collector));
  EXPECT_TRUE(stream.error().empty()) << "nothing yet is no error";
  // A part of a message does not count.
  InaEnvelope const envelope{100, 0};
  ASSERT_EQ(::write(pair.a.get(), &envelope, sizeof(envelope)), ssize_t(sizeof(envelope)));
  pair.a = FileDescriptor();
  EXPECT_FALSE(stream.receive(collector));
  while (stream.error().empty()) EXPECT_FALSE(stream.receive(collector));
  EXPECT_TRUE(collector.messages.empty());

  Pair other;
  MessageStream writer(other.a.get());
  other.b = FileDescriptor();
  Bytes const bytes(100);
  InaMessage message;
  message.add(bytes);
  writer.send(0, message);
  EXPECT_FALSE(writer.error().empty());
  writer.send(0, message);  // does nothing more
}

TEST(MessageStream, CopiesThatNobodyReadsAreBounded) {
  Pair pair;
  MessageStream from(pair.a.get());
  Bytes const bytes(10000);
  for (int i = 0; i < 6; ++i) from.send_copy(0, bytes);
  EXPECT_TRUE(from.error().empty());
  for (int i = 0; i < 4; ++i) from.send_copy(0, bytes);
  EXPECT_NE(from.error().find(std::to_string(MessageStream::most_copied)), std::string::npos);
}

}  // namespace
}  // namespace sparsecomm::test
