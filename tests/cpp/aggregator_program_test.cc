// What operators see of an aggregator, over HTTP, while it serves, hangs and ends.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/program/http_server.h"
#include "daemon/program/log.h"
#include "daemon/program/service.h"
#include "ina/socket.h"
#include "ina_cluster.h"

namespace sparsecomm::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Until the other side closes.
std::string read_to_end(FileDescriptor const& socket) {
  Deadline const deadline = within(seconds(30));
  std::string all;
  std::array<char, 4096> part;
  while (wait_readable(socket.get(), deadline)) {
    ssize_t const read = ::recv(socket.get(), part.data(), part.size(), 0);
    if (read <= 0) break;
    all.append(part.data(), std::size_t(read));
  }
  return all;
}

class AggregatorProgram : public ::testing::Test {
 protected:
  AggregatorProgram() {
    auto control = listen_at("127.0.0.1:0");
    address_ = local_address(control);
    std::vector<HttpListener> listeners;
    listeners.push_back({.socket = std::move(control), .control = true});
    http_ = std::make_unique<HttpServer>(
        std::move(listeners),
        [this](HttpRequest const& request) { return service_.answer(request); }, seconds(3));
  }

  FileDescriptor ask(std::string const& what) const {
    FileDescriptor socket = connect_to(address_, within(seconds(10)));
    std::string const request = concat(what, " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              std::ssize(request));
    return socket;
  }
  // The status and the body.
  std::string answer(std::string const& what) const {
    std::string const all = read_to_end(ask(what));
    std::size_t const body = all.find("\r\n\r\n");
    if (body == std::string::npos) return all;
    return concat(all.substr(9, 3), " ", all.substr(body + 4));
  }

  RunningServer running_;
  Service service_{running_.server(), [] { return std::size_t{3}; }, seconds(30)};
  std::string address_;
  std::unique_ptr<HttpServer> http_;
};

TEST_F(AggregatorProgram, AnswersWhileItServes) {
  EXPECT_EQ(answer("GET /healthz"), "200 ok\n");
  EXPECT_EQ(answer("GET /readyz"), "200 ready\n");
  EXPECT_EQ(answer("GET /jobs"), "200 {\"jobs\":[]}\n");
  EXPECT_NE(answer("GET /metrics").find("sparsecomm_aggregator_tokens 3\n"), std::string::npos);
  EXPECT_EQ(answer("GET /drain").substr(0, 3), "405");
  EXPECT_EQ(answer("DELETE /jobs/0").substr(0, 3), "404");
  EXPECT_EQ(answer("POST /drain?limit=soon").substr(0, 3), "400");
  EXPECT_EQ(answer("POST /drain?until=9").substr(0, 3), "400");
}

TEST_F(AggregatorProgram, IsNotHealthyWhileTheThreadThatServesHangs) {
  std::promise<void> released;
  running_.server().post([&, wait = released.get_future().share()] { wait.wait(); });
  EXPECT_EQ(answer("GET /healthz").substr(0, 3), "503");
  EXPECT_EQ(answer("GET /metrics").substr(0, 3), "503");
  released.set_value();
  EXPECT_EQ(answer("GET /healthz"), "200 ok\n");
}

TEST_F(AggregatorProgram, SaysSoOnceItHasEnded) {
  running_.call([](AggregatorServer& server) { server.drain(Duration::zero()); });
  ASSERT_TRUE(running_.ends_within(seconds(20)));
  TimePoint const begin = steady_clock().now();
  EXPECT_EQ(answer("GET /healthz").substr(0, 3), "503");
  EXPECT_LT(steady_clock().now() - begin, milliseconds(900));  // it does not wait for an answer
}

TEST_F(AggregatorProgram, EndsWhileOthersAsk) {
  std::atomic<bool> over = false;
  std::vector<std::jthread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      while (!over.load()) {
        try {
          read_to_end(ask("GET /metrics"));
        } catch (AddressError const&) {
          return;  // nobody listens any more
        }
      }
    });
  }
  std::this_thread::sleep_for(milliseconds(200));
  running_.call([](AggregatorServer& server) { server.drain(Duration::zero()); });
  http_.reset();
  over = true;
}

TEST_F(AggregatorProgram, ConnectionsThatSayNothingLeaveRoomForOthers) {
  std::vector<FileDescriptor> silent;
  for (std::size_t i = 0; i < HttpServer::most_connections + 10; ++i) {
    silent.push_back(connect_to(address_, within(seconds(10))));
  }
  EXPECT_EQ(answer("GET /healthz"), "200 ok\n");
  for (FileDescriptor const& socket : silent) EXPECT_EQ(read_to_end(socket), "");
}

TEST(ProgramLog, LinesBelowItsLevelLeaveRoomForOthers) {
  std::string const file = concat(::testing::TempDir(), "/aggregator-", ::getpid(), ".log");
  {
    ProgramLog log({.format = LogFormat::json, .least = LogLevel::warning, .file = file});
    for (std::uint64_t i = 0; i < 2 * ProgramLog::most_lines; ++i) log.write({.text = "left"});
    log.write({.level = LogLevel::warning, .text = "a \"quoted\"\nline", .fields = {{"job", "x"}}});
  }
  std::ifstream lines(file);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_NE(line.find(R"("message":"a \"quoted\"\nline","job":"x"})"), std::string::npos) << line;
  EXPECT_FALSE(std::getline(lines, line)) << line;
  ::unlink(file.c_str());
}

}  // namespace
}  // namespace sparsecomm::test
