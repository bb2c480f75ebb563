// The server of an aggregator under connections that say nothing, too much or nonsense, its command
// line, and what a worker is told that connects to something else.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <random>
#include <utility>

#include "daemon/command_line.h"
#include "ina/socket.h"
#include "ina_cluster.h"

namespace sparsecomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

template <class T>
void write_raw(FileDescriptor const& socket, T const& value) {
  EXPECT_EQ(::send(socket.get(), &value, sizeof(value), MSG_NOSIGNAL), ssize_t(sizeof(value)));
}

// Everything that comes until there is enough, the other side closes, or `limit`.
std::string read_raw(FileDescriptor const& socket, Duration limit = seconds(20),
                     std::size_t enough = 1 << 20) {
  Deadline const deadline = within(limit);
  std::string all;
  std::array<char, 4096> part;
  while (all.size() < enough && wait_readable(socket.get(), deadline)) {
    ssize_t const read = ::recv(socket.get(), part.data(), part.size(), 0);
    if (read <= 0) break;
    all.append(part.data(), std::size_t(read));
  }
  return all;
}

JobMember member(int worker, int workers, JobId job = some_job) {
  return {.job = job,
          .workers = static_cast<std::uint16_t>(workers),
          .worker = static_cast<std::uint16_t>(worker)};
}

InaGreeting greeting(int worker, int workers, JobId job = some_job) {
  InaGreeting greeting;
  std::memcpy(&greeting, make_greeting(member(worker, workers, job)).data(), sizeof(greeting));
  return greeting;
}

MessageOptions const over_ucx = messages_over(MessageTransport::ucx);

// One worker of one job is served.
void expect_serves(RunningServer const& server, MessageOptions const& messages = {}) {
  std::vector<std::string> const addresses{server.address()};
  JobMember const member{.job = {9, 9}, .workers = 1, .worker = 0};
  InaClient client(connect_aggregators(addresses, member, within(seconds(10)), messages), 0, 2);
  InaPlan const plan{.elements = 5000, .workers = 1};
  std::vector<float> data(plan.elements, 3);
  auto const bytes = std::as_writable_bytes(std::span(data));
  client.reduce(plan, bytes, bytes, within(seconds(10)));
  EXPECT_EQ(data, std::vector<float>(plan.elements, 3));
}

// No HMAC, but as an aggregator sees it: bytes that depend on the key and on every one of the
// message.
Prover prover(std::string const& key) {
  return [key](std::span<const std::byte> message) {
    Proof proof{};
    std::uint64_t hash = std::hash<std::string>{}(key);
    for (std::size_t i = 0; i < std::max(message.size(), proof.size()); ++i) {
      hash = (hash ^ std::to_integer<std::uint64_t>(message[i % message.size()])) * 0x100000001b3u;
      proof[i % proof.size()] ^= std::byte(hash >> 32);
    }
    return proof;
  };
}

AggregatorOptions with_tokens() {
  AggregatorOptions options;
  options.authenticate = [](std::span<const std::byte> message, Proof const& proof) {
    for (std::string const owner : {"one", "two"}) {
      if (prover("token of " + owner)(message) == proof) return owner;
    }
    return std::string();
  };
  options.greeting = seconds(1);
  return options;
}

std::string refusal(RunningServer const& server, JobMember const& member, Prover const& prove) {
  std::vector<std::string> const addresses{server.address()};
  try {
    connect_aggregators(addresses, member, within(seconds(10)), {}, prove);
  } catch (AddressError const& error) {
    return error.what();
  }
  return "";
}

TEST(AggregatorServer, TokensLetWorkersInAndKeepJobsApart) {
  RunningServer const server(with_tokens());
  std::vector<std::string> const addresses{server.address()};
  Prover const one = prover("token of one"), two = prover("token of two");
  EXPECT_NE(refusal(server, member(0, 2), {}).find("asks for a token"), std::string::npos);
  EXPECT_NE(refusal(server, member(0, 2), prover("guessed")).find("token is none"),
            std::string::npos);
  auto const first = connect_aggregators(addresses, member(0, 2), within(seconds(10)), {}, one);
  EXPECT_NE(refusal(server, member(1, 2), two).find("another token"), std::string::npos);
  EXPECT_EQ(refusal(server, member(1, 2), one), "");
  EXPECT_EQ(refusal(server, member(0, 1, {7, 7}), two), "");
}

// Who has listened to another connection, or sends what is no proof, is not let in.
TEST(AggregatorServer, AProofIsOfOneConnection) {
  RunningServer const server(with_tokens());
  std::string const greeting_bytes = [] {
    auto const bytes = make_greeting(member(0, 1));
    return std::string(reinterpret_cast<char const*>(bytes.data()), bytes.size());
  }();
  auto const challenged = [&] {
    FileDescriptor socket = connect_to(server.address(), within(seconds(10)));
    EXPECT_EQ(::send(socket.get(), greeting_bytes.data(), greeting_bytes.size(), MSG_NOSIGNAL),
              std::ssize(greeting_bytes));
    std::string const bytes = read_raw(socket, seconds(20), sizeof(InaAnswer) + sizeof(Challenge));
    EXPECT_EQ(bytes.size(), sizeof(InaAnswer) + sizeof(Challenge));
    Challenge challenge;
    std::memcpy(challenge.data(), bytes.data() + sizeof(InaAnswer), sizeof(challenge));
    return std::pair(std::move(socket), challenge);
  };
  auto const [good, challenge] = challenged();
  Proof const proof =
      prover("token of one")(proof_message(challenge, std::as_bytes(std::span(greeting_bytes))));
  write_raw(good, proof);
  EXPECT_EQ(read_raw(good, seconds(20), sizeof(InaAnswer)).size(), sizeof(InaAnswer));

  auto const [again, other] = challenged();
  EXPECT_NE(other, challenge);
  write_raw(again, proof);
  EXPECT_NE(read_raw(again).find("token is none"), std::string::npos);

  auto const [short_of_it, unused] = challenged();  // says no more
  EXPECT_EQ(read_raw(short_of_it), "");
  EXPECT_NE(server.log().find("no greeting within 1 s"), std::string::npos);
}

TEST(AggregatorServer, OtherVersionsAndNonsenseAreAnsweredAndClosed) {
  RunningServer const server;
  InaGreeting const good = greeting(0, 2);
  InaGreeting other = good;
  other.version = 77;
  InaGreeting strange = good;
  strange.magic = 0x47455420;
  InaGreeting beyond = good;
  beyond.worker = 2;
  InaGreeting reserved = good;
  reserved.reserved[1] = 1;
  InaGreeting endless = good;
  endless.introduction_bytes = UcxMessages::most_introduction + 1;
  endless.token = 1;
  InaGreeting token = good;
  token.token = 1;
  for (auto const& [bad, says] : {std::pair{other, "77"},
                                  {strange, "magic"},
                                  {beyond, "worker"},
                                  {reserved, "reserved"},
                                  {endless, "introduction_bytes"},
                                  {token, "token"}}) {
    auto const socket = connect_to(server.address(), within(seconds(5)));
    write_raw(socket, bad);
    std::string const answer = read_raw(socket);
    EXPECT_NE(answer.find(says), std::string::npos) << answer;
  }
  expect_serves(server);
}

TEST(AggregatorServer, RandomBytesHarmNobody) {
  RunningServer const server;
  std::mt19937_64 random(11);
  for (int i = 0; i < 200; ++i) {
    auto const socket = connect_to(server.address(), within(seconds(5)));
    if (i % 2 == 0) write_raw(socket, greeting(0, 1, {7, std::uint64_t(i)}));
    Bytes bytes(random() % 3000);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    if (i % 4 == 0 && bytes.size() >= sizeof(InaEnvelope)) {
      InaEnvelope const envelope{static_cast<std::uint32_t>(bytes.size()), 0};
      std::memcpy(bytes.data(), &envelope, sizeof(envelope));
    }
    ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (i % 20 == 0) expect_serves(server);
  }
  expect_serves(server);
}

// The end of a connection may come with its last bytes.
TEST(AggregatorServer, AWorkerThatEndsRightAfterItsMessageIsLost) {
  RunningServer const server;
  std::vector<std::string> const addresses{server.address()};
  InaClient client(connect_aggregators(addresses, {.job = some_job, .workers = 2, .worker = 0},
                                       within(seconds(10))),
                   0, 1);
  InaPlan const plan{.elements = 10000, .workers = 2};
  {
    auto const link = connect_aggregators(addresses, {.job = some_job, .workers = 2, .worker = 1},
                                          within(seconds(10)));
    Bytes data(plan.bytes(), std::byte{1});
    InaWorker worker;
    auto const message = worker.start(plan, 1, 1, data, data, steady_clock().now(), seconds(10));
    link->send(0, 0, message);
  }
  Bytes data(plan.bytes());
  EXPECT_THROW(client.reduce(plan, data, data, within(seconds(20))), PeerLost);
}

// A forked child holds the sockets of its parent.
void expect_closing_noticed_while_a_child_lives(MessageOptions const& messages) {
  AggregatorOptions options;
  options.messages = messages;
  RunningServer const server(options);
  std::vector<std::string> const addresses{server.address()};
  InaClient client(connect_aggregators(addresses, member(0, 2), within(seconds(10)), messages), 0,
                   1);
  auto link = connect_aggregators(addresses, member(1, 2), within(seconds(10)), messages);
  pid_t const child = ::fork();
  if (child == 0) {
    link.reset();  // does nothing to the parent's
    ::pause();
    ::_exit(0);
  }
  InaPlan const plan{.elements = 10000, .workers = 2};
  Bytes data(plan.bytes());
  link.reset();
  EXPECT_THROW(client.reduce(plan, data, data, within(seconds(20))), PeerLost);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(AggregatorServer, ALinkThatIsClosedIsNoticedWhileAChildLives) {
  expect_closing_noticed_while_a_child_lives(messages_over(MessageTransport::tcp));
}

TEST(AggregatorServer, WhoSaysNothingIsClosed) {
  AggregatorOptions options;
  options.greeting = milliseconds(200);
  RunningServer const server(options);
  auto const silent = connect_to(server.address(), within(seconds(5)));
  auto const halting = connect_to(server.address(), within(seconds(5)));
  write_raw(halting, std::uint32_t{greeting_magic});
  EXPECT_EQ(read_raw(silent), "");
  EXPECT_EQ(read_raw(halting), "");
  expect_serves(server);
}

TEST(AggregatorServer, ConnectionsBeyondTheMostWaitForOthersToEnd) {
  AggregatorOptions options;
  options.connections = 2;
  RunningServer const server(options);
  auto first = connect_to(server.address(), within(seconds(5)));
  auto const second = connect_to(server.address(), within(seconds(5)));
  write_raw(first, greeting(0, 2));
  write_raw(second, greeting(1, 2));
  EXPECT_EQ(read_raw(first, seconds(20), sizeof(InaAnswer)).size(), sizeof(InaAnswer));
  auto const third = connect_to(server.address(), within(seconds(5)));
  write_raw(third, greeting(0, 1, {8, 8}));
  EXPECT_EQ(read_raw(third, milliseconds(300)), "");
  first = FileDescriptor();
  EXPECT_EQ(read_raw(third, seconds(20), sizeof(InaAnswer)).size(), sizeof(InaAnswer));
}

TEST(AggregatorServer, DrainsWhenItsJobsHaveEnded) {
  RunningServer server;
  std::vector<std::string> const addresses{server.address()};
  auto first = connect_aggregators(addresses, member(0, 2), within(seconds(10)));
  server.call([](AggregatorServer& self) { self.drain(std::chrono::hours(1)); });
  EXPECT_TRUE(server.call([](AggregatorServer& self) { return self.report().draining; }));
  EXPECT_NE(refusal(server, member(0, 1, {7, 7}), {}).find("draining"), std::string::npos);
  // A worker of a job that is there may still come.
  auto second = connect_aggregators(addresses, member(1, 2), within(seconds(10)));
  first.reset();
  EXPECT_FALSE(server.ends_within(milliseconds(300)));
  second.reset();
  EXPECT_TRUE(server.ends_within(seconds(20)));
}

TEST(AggregatorServer, DrainsNoLongerThanItsLimit) {
  RunningServer server;
  std::vector<std::string> const addresses{server.address()};
  auto const link = connect_aggregators(addresses, member(0, 1), within(seconds(10)));
  server.call([](AggregatorServer& self) { self.drain(milliseconds(100)); });
  EXPECT_TRUE(server.ends_within(seconds(20)));
  EXPECT_NE(server.log().find("not ended: 1"), std::string::npos) << server.log();
}

TEST(AggregatorServer, AnOperatorEndsAJobAndOthersDoNotNotice) {
  RunningServer server;
  auto const one = connect_to(server.address(), within(seconds(5)));
  auto const other = connect_to(server.address(), within(seconds(5)));
  for (auto const& [socket, job] : {std::pair(&one, JobId{1, 1}), {&other, {2, 2}}}) {
    write_raw(*socket, greeting(0, 1, job));
    EXPECT_EQ(read_raw(*socket, seconds(20), sizeof(InaAnswer)).size(), sizeof(InaAnswer));
  }
  EXPECT_TRUE(server.call([](AggregatorServer& self) { return self.end_job({1, 1}); }));
  EXPECT_FALSE(server.call([](AggregatorServer& self) { return self.end_job({1, 1}); }));
  EXPECT_EQ(read_raw(one), "");
  auto const report = server.call([](AggregatorServer& self) { return self.report(); });
  ASSERT_EQ(report.jobs.size(), 1u);
  EXPECT_EQ(report.jobs[0].id, (JobId{2, 2}));
  EXPECT_EQ(report.begun_jobs, 2u);
  EXPECT_EQ(report.closed[std::size_t(CloseCause::ended)], 1u);
  EXPECT_EQ(report.connections, 1u);
}

// One connection is closed in the end, for that cause.
void expect_closed(AggregatorOptions const& options, CloseCause cause,
                   std::function<void(RunningServer&)> const& connect) {
  RunningServer server(options);
  connect(server);
  Deadline const deadline = within(seconds(20));
  for (;;) {
    auto const report = server.call([](AggregatorServer& self) { return self.report(); });
    if (report.closed[std::size_t(cause)] == 1) return;
    ASSERT_FALSE(deadline.passed()) << int(cause);
    std::this_thread::sleep_for(milliseconds(20));
  }
}

TEST(AggregatorServer, CountsWhyConnectionsWereClosed) {
  auto const connected = [](RunningServer const& server) {
    return connect_to(server.address(), within(seconds(5)));
  };
  AggregatorOptions hasty;
  hasty.greeting = milliseconds(200);
  FileDescriptor socket;
  expect_closed(hasty, CloseCause::silent, [&](auto& server) { socket = connected(server); });
  expect_closed({}, CloseCause::left, [&](auto& server) { connected(server); });
  expect_closed({}, CloseCause::greeting, [&](auto& server) {
    socket = connected(server);
    write_raw(socket, std::array<char, sizeof(InaGreeting)>{"nonsense"});
  });
  expect_closed(with_tokens(), CloseCause::token, [](auto& server) {
    EXPECT_NE(refusal(server, member(0, 2), prover("guessed")), "");
  });
  expect_closed(with_tokens(), CloseCause::token,
                [](auto& server) { EXPECT_NE(refusal(server, member(0, 2), {}), ""); });
  expect_closed({}, CloseCause::refused,
                [](auto& server) { EXPECT_NE(refusal(server, member(0, 1025), {}), ""); });
  AggregatorOptions impatient;
  impatient.idle = milliseconds(200);
  expect_closed(impatient, CloseCause::idle, [&](auto& server) {
    socket = connected(server);
    write_raw(socket, greeting(0, 1));
  });
  expect_closed({}, CloseCause::protocol, [&](auto& server) {
    socket = connected(server);
    write_raw(socket, greeting(0, 1));
    write_raw(socket, std::array<char, 256>{});
  });
}

TEST(AggregatorServer, WhatIsPostedAfterItsEndIsRefused) {
  AggregatorOptions options;
  options.listen = "127.0.0.1:0";
  AggregatorServer server(options, [](LogEntry const&) {});
  bool ran = false;
  EXPECT_TRUE(server.post([&] { server.drain(Duration::zero()); }));
  server.run();
  EXPECT_FALSE(server.post([&] { ran = true; }));
  EXPECT_FALSE(ran);
}

TEST(AggregatorServer, MemoryDoesNotGrowWithWhatIsAnnounced) {
  AggregatorOptions options;
  options.memory = 1 << 17;
  RunningServer const server(options);
  // An opening of the longest message there is, of which most never comes.
  InaPlan const plan{.elements = std::uint64_t{1} << 30,
                     .block_bytes = most_block_bytes,
                     .workers = 1,
                     .window = most_blocks};
  auto const socket = connect_to(server.address(), within(seconds(5)));
  write_raw(socket, greeting(0, 1));
  Bytes head(most_head_bytes(plan.window));
  encode_contribution({.operation = 1, .bitmap = 0}, plan, {}, {}, {}, head);
  write_raw(socket, InaEnvelope{static_cast<std::uint32_t>(longest_message), 0});
  EXPECT_EQ(::send(socket.get(), head.data(), opening_bytes, MSG_NOSIGNAL), ssize_t(opening_bytes));
  std::size_t const least = sizeof(InaAnswer) + sizeof(InaEnvelope) + sizeof(InaHeader) + 100;
  std::string const answer = read_raw(socket, seconds(20), least);
  EXPECT_NE(answer.find(std::to_string(instance_bytes(plan))), std::string::npos) << answer;
  expect_serves(server);
}

class AggregatorServerOverUcx : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string const problem = ucx_problem_here(); !problem.empty()) GTEST_SKIP() << problem;
  }
  static AggregatorOptions options(MessageTransport transport = MessageTransport::automatic) {
    AggregatorOptions options;
    options.messages = messages_over(transport);
    return options;
  }
};

// Takes what comes as it is.
struct AnySink final : MessageSink {
  Place place(std::uint32_t, std::size_t size, std::span<const std::byte>) override {
    bytes.resize(size);
    return {bytes, nullptr};
  }
  void take(std::uint32_t, std::span<const std::byte> message) override {
    taken = std::string(reinterpret_cast<char const*>(message.data()), message.size());
  }
  Bytes bytes;
  std::string taken;
};

// A connection that has greeted and may send what it likes.
struct RawUcx {
  RawUcx(RunningServer const& server, JobMember const& who, UcxMessages& messages)
      : socket(connect_to(server.address(), within(seconds(5)))) {
    std::uint64_t const own = UcxMessages::draw_token();
    auto const bytes = make_greeting(who, {messages.introduction(), own});
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
    std::string const fixed = read_raw(socket, seconds(20), sizeof(InaAnswer));
    // The fixed part and what follows it come together.
    auto const answer = parse_answer(std::as_bytes(std::span(fixed)).first<sizeof(InaAnswer)>());
    token = answer.token;
    introduction = fixed.substr(sizeof(InaAnswer));
    EXPECT_EQ(introduction.size(), answer.introduction_bytes);
    connection = messages.connect(introduction, own, token, sink);
  }
  FileDescriptor socket;
  std::uint64_t token = 0;
  std::string introduction;
  AnySink sink;
  std::unique_ptr<UcxConnection> connection;
};

// Whether the server closes the socket within a while.
bool is_closed(RawUcx const& raw, UcxMessages& messages) {
  Deadline const deadline = within(seconds(10));
  while (!deadline.passed()) {
    messages.progress();
    std::byte byte{};
    ssize_t const read = ::recv(raw.socket.get(), &byte, 1, MSG_DONTWAIT);
    if (read == 0) return true;
    EXPECT_EQ(read, -1);
  }
  return false;
}

TEST_F(AggregatorServerOverUcx, NonsenseEndsItsConnectionAlone) {
  RunningServer const server(options());
  auto const messages = make_ucx_messages(over_ucx.ucx, 1);
  std::mt19937_64 random(5);
  std::uint64_t job = 0;
  for (std::size_t const bytes : {0, 1, 31, 32, 63, 64, 65, 1000, 300000}) {
    RawUcx const raw(server, member(0, 1, {3, ++job}), *messages);
    Bytes nonsense(bytes);
    for (auto& byte : nonsense) byte = static_cast<std::byte>(random());
    std::span<const std::byte> const piece = nonsense;
    raw.connection->send(static_cast<std::uint32_t>(random() % 100), std::span(&piece, 1), nullptr);
    EXPECT_TRUE(is_closed(raw, *messages)) << bytes;
  }
  expect_serves(server, over_ucx);
  expect_serves(server);
}

TEST_F(AggregatorServerOverUcx, UnknownTokensAreDropped) {
  RunningServer const server(options());
  auto const messages = make_ucx_messages(over_ucx.ucx, 1);
  RawUcx const raw(server, member(0, 1, {3, 1}), *messages);
  AnySink sink;
  auto const stranger = messages->connect(raw.introduction, 5, raw.token ^ 1, sink);
  for (std::size_t const bytes : {32, 1000, 300000}) {
    Bytes const nonsense(bytes);
    std::span<const std::byte> const piece = nonsense;
    stranger->send(0, std::span(&piece, 1), nullptr);
    Deadline const deadline = within(seconds(10));
    while (!stranger->flushed() && !deadline.passed()) messages->progress();
    EXPECT_TRUE(stranger->flushed()) << bytes;
  }
  expect_serves(server, over_ucx);
  EXPECT_EQ(server.log().find("closed: "), server.log().rfind("closed: ")) << server.log();
}

TEST_F(AggregatorServerOverUcx, AnIntroductionThatIsChangedIsRefused) {
  RunningServer const server(options());
  auto const messages = make_ucx_messages(over_ucx.ucx, 1);
  for (std::size_t const at : {std::size_t{0}, messages->introduction().size() - 1}) {
    std::string introduction = messages->introduction();
    introduction[at] ^= 1;
    auto const socket = connect_to(server.address(), within(seconds(5)));
    auto const bytes = make_greeting(member(0, 2), {introduction, 7});
    EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
    std::string const answer = read_raw(socket);
    EXPECT_NE(answer.find("checksum"), std::string::npos) << answer;
  }
  expect_serves(server, over_ucx);
}

TEST_F(AggregatorServerOverUcx, BytesOverTheSocketEndIt) {
  RunningServer const server(options());
  auto const messages = make_ucx_messages(over_ucx.ucx, 1);
  RawUcx const raw(server, member(0, 1), *messages);
  write_raw(raw.socket, std::array<InaEnvelope, 20>{InaEnvelope{64, 0}});
  EXPECT_TRUE(is_closed(raw, *messages));
}

TEST_F(AggregatorServerOverUcx, ALinkThatIsClosedIsNoticedWhileAChildLives) {
  expect_closing_noticed_while_a_child_lives(over_ucx);
}

// One job: a worker with UCX, one without, and aggregators of both kinds.
TEST_F(AggregatorServerOverUcx, ThoseWithoutWorkBesideIt) {
  RunningServer const with(options()), without(options(MessageTransport::tcp));
  std::vector<std::string> const addresses{with.address(), without.address()};
  for_each_rank(2, [&](int rank) {
    MessageOptions const way =
        messages_over(rank == 0 ? MessageTransport::automatic : MessageTransport::tcp);
    InaClient client(connect_aggregators(addresses, member(rank, 2), within(seconds(10)), way),
                     rank, 4);
    InaPlan const plan{.elements = 100000, .workers = 2};
    for (int i = 0; i < 10; ++i) {
      std::vector<float> data(plan.elements, 3);
      auto const bytes = std::as_writable_bytes(std::span(data));
      client.reduce(plan, bytes, bytes, within(seconds(20)));
      EXPECT_EQ(data, std::vector<float>(plan.elements, 6));
    }
  });
}

// Here UCX would go over shared memory.
TEST_F(AggregatorServerOverUcx, WhereItHasButTcpMessagesGoOverASocket) {
  RunningServer const server(options());
  MessageOptions far = messages_over(MessageTransport::automatic);
  far.ucx.settings.emplace_back("TLS", "tcp");
  std::vector<std::string> const addresses{server.address()};
  InaClient client(connect_aggregators(addresses, member(0, 1), within(seconds(10)), far), 0, 4);
  InaPlan const plan{.elements = 1000, .workers = 1};
  std::vector<float> data(plan.elements, 3);
  auto const bytes = std::as_writable_bytes(std::span(data));
  client.reduce(plan, bytes, bytes, within(seconds(20)));
  EXPECT_EQ(data, std::vector<float>(plan.elements, 3));
  EXPECT_NE(server.log().find("go over TCP: no way over UCX"), std::string::npos) << server.log();
}

TEST_F(AggregatorServerOverUcx, WhoAsksForItIsToldThatItIsNotThere) {
  RunningServer const with(options(MessageTransport::ucx));
  RunningServer const without(options(MessageTransport::tcp));
  auto const connect = [](RunningServer const& server, MessageTransport transport) {
    std::vector<std::string> const addresses{server.address()};
    connect_aggregators(addresses, member(0, 1), within(seconds(5)), messages_over(transport));
  };
  EXPECT_THROW(connect(without, MessageTransport::ucx), AddressError);
  EXPECT_THROW(connect(with, MessageTransport::tcp), AddressError);
  MessageOptions missing = over_ucx;
  missing.ucx.library = "/no/such/libucp.so";
  std::vector<std::string> const addresses{with.address()};
  EXPECT_THROW(connect_aggregators(addresses, member(0, 1), within(seconds(5)), missing),
               TransportUnavailable);
  AggregatorOptions wanting = options(MessageTransport::ucx);
  wanting.messages = missing;
  EXPECT_THROW(RunningServer{wanting}, TransportUnavailable);
  wanting.messages.transport = MessageTransport::automatic;
  RunningServer const alone(wanting);
  EXPECT_NE(alone.log().find("over TCP"), std::string::npos) << alone.log();
  expect_serves(alone);
}

TEST(ConnectAggregators, ErrorsNameTheAddress) {
  auto const problem = [](std::string const& address, Duration limit) {
    std::vector<std::string> const addresses{address};
    try {
      connect_aggregators(addresses, {.job = some_job, .workers = 1, .worker = 0}, within(limit));
    } catch (AddressError const& error) {
      EXPECT_NE(std::string(error.what()).find(address), std::string::npos) << error.what();
      return std::string(error.what());
    }
    ADD_FAILURE() << "no error for " << address;
    return std::string();
  };
  auto listener = listen_at("127.0.0.1:0");
  std::string const address = local_address(listener);
  // Listens and never answers.
  TimePoint const begin = steady_clock().now();
  problem(address, milliseconds(200));
  EXPECT_GE(steady_clock().now() - begin, milliseconds(200));
  // Nobody listens.
  listener = FileDescriptor();
  problem(address, seconds(20));
  problem("no-such-host.invalid:7000", seconds(20));
  // Something else, which talks first.
  auto const other = listen_at("127.0.0.1:0");
  std::thread talks([&] {
    ASSERT_TRUE(wait_readable(other.get(), within(seconds(10))));
    auto const socket = accept_from(other);
    ::send(socket.get(), "SSH-2.0-other\r\n", 15, MSG_NOSIGNAL);
    read_raw(socket);
  });
  problem(local_address(other), seconds(5));
  talks.join();
}

TEST(ConnectAggregators, AJobOfAnotherSizeIsRefusedInWords) {
  RunningServer const server;
  std::vector<std::string> const addresses{server.address()};
  auto const link = connect_aggregators(addresses, {.job = some_job, .workers = 2, .worker = 0},
                                        within(seconds(5)));
  try {
    connect_aggregators(addresses, {.job = some_job, .workers = 3, .worker = 1},
                        within(seconds(5)));
    ADD_FAILURE() << "no error";
  } catch (AddressError const& error) {
    std::string const text = error.what();
    EXPECT_NE(text.find(server.address()), std::string::npos) << text;
    EXPECT_NE(text.find("3 workers"), std::string::npos) << text;
  }
}

TEST(HostPort, Parses) {
  EXPECT_EQ(HostPort::parse("a.b:70").host, "a.b");
  EXPECT_EQ(HostPort::parse(":70").host, "");
  EXPECT_EQ(HostPort::parse("[::1]:70").host, "::1");
  EXPECT_EQ(HostPort::parse("[::1]:70").port, "70");
  for (char const* bad : {"", "host", "host:", "host:x", "host:65536", "host:-1", "::1:70",
                          "host:123456", "host:7 "}) {
    EXPECT_THROW(HostPort::parse(bad), InvalidArgument) << bad;
  }
}

AggregatorCommand parse(std::vector<char const*> arguments,
                        std::vector<WrittenSetting> const& written = {}) {
  return parse_command_line(arguments, [&](std::string const& /*file*/) { return written; });
}

TEST(AggregatorCommandLine, GoesBeforeTheFile) {
  std::vector<WrittenSetting> const written = {{"listen", ":1", "a.toml:1"},
                                               {"memory", "1MiB", "a.toml:2"},
                                               {"log-format", "json", "a.toml:3"}};
  auto const command = parse({"--memory", "2MiB", "--config", "a.toml"}, written);
  EXPECT_EQ(command.options.listen, ":1");
  EXPECT_EQ(command.options.memory, std::size_t{2} << 20);
  EXPECT_EQ(command.log.format, LogFormat::json);
  for (WrittenSetting const& bad : {WrittenSetting{"speed", "9", "a.toml:7"},
                                    {"memory", "much", "a.toml:7"},
                                    {"log-level", "loud", "a.toml:7"}}) {
    try {
      parse({"--listen", ":1", "--config", "a.toml"}, {bad});
      ADD_FAILURE() << bad.name;
    } catch (InvalidArgument const& error) {
      std::string const text = error.what();
      EXPECT_NE(text.find("a.toml:7"), std::string::npos) << text;
      EXPECT_NE(text.find(bad.name == "speed" ? "speed" : bad.value), std::string::npos) << text;
    }
  }
}

TEST(AggregatorCommandLine, Parses) {
  auto const command =
      parse({"--listen", "10.0.0.1:7", "--memory=3MiB", "--limit", "1.5", "--connections", "12",
             "--transport", "ucx", "--ucx-library", "/a/libucp.so.0"});
  EXPECT_EQ(command.options.listen, "10.0.0.1:7");
  EXPECT_EQ(command.options.memory, std::size_t{3} << 20);
  EXPECT_EQ(command.options.limit, milliseconds(1500));
  EXPECT_EQ(command.options.connections, 12u);
  EXPECT_EQ(command.options.messages.transport, MessageTransport::ucx);
  EXPECT_EQ(command.options.messages.ucx.library, "/a/libucp.so.0");
  EXPECT_TRUE(parse({"--help"}).help);
  for (std::vector<char const*> const& bad : {std::vector<char const*>{},
                                              {"--listen"},
                                              {"--listen", "7000"},
                                              {"--speed", "9"},
                                              {"--listen", ":7", "--memory", "0"},
                                              {"--listen", ":7", "--memory", "3MB"},
                                              {"--listen", ":7", "--memory", "99999999999GiB"},
                                              {"--listen", ":7", "--limit", "0"},
                                              {"--listen", ":7", "--limit", "nan"},
                                              {"--listen", ":7", "--connections", "1x"},
                                              {"--listen", ":7", "--transport", "udp"},
                                              {":7"}}) {
    EXPECT_THROW(parse(bad), InvalidArgument);
  }
}

}  // namespace
}  // namespace sparsecomm::test
