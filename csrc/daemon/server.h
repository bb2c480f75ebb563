// An aggregator as a server over TCP and UCX: one thread, any number of jobs one after another and
// at once.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "ina/greeting.h"
#include "ina/host.h"
#include "ina/message_path.h"
#include "ina/socket.h"

namespace sparsecomm {

// Says who has the token that the proof of a message was made with; empty: nobody.
using Authenticator =
    std::function<std::string(std::span<const std::byte> message, Proof const& proof)>;

struct AggregatorOptions {
  std::string listen;                            // HOST:PORT; port 0: a free one
  std::size_t memory = std::size_t{1} << 28;     // bytes, of all operations together
  Duration limit = std::chrono::seconds(60);     // of a round of an operation
  Duration greeting = std::chrono::seconds(10);  // within which a connection says who it is
  std::size_t connections = 1024;
  // UCX trusts those who connect.
  MessageOptions messages{.transport = MessageTransport::tcp, .ucx = {}};
  InaPolicy const* policy = &vote_policy;
  Authenticator authenticate = {};  // empty: no token is asked for
};

class AggregatorServer final : private InaHost::Outlet {
 public:
  using Log = std::function<void(std::string const& line)>;

  // Listens. Throws AddressError if that cannot be, and TransportUnavailable if messages are to go
  // over UCX, which cannot be used here.
  AggregatorServer(AggregatorOptions const& options, Log log);
  AggregatorServer(AggregatorServer const&) = delete;
  AggregatorServer& operator=(AggregatorServer const&) = delete;

  // In digits, with the port that was chosen.
  std::string const& address() const { return address_; }

  // Bytes of all messages of operations, without their envelopes.
  std::uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }

  // Serves until stop(), from any thread, or until the file of stop_when() is readable.
  void run();
  void stop() noexcept;
  void stop_when(FileDescriptor const& readable);

 private:
  struct Connection final : MessageSink {
    Connection(AggregatorServer& its_server, int its_number, FileDescriptor accepted,
               TimePoint now);

    Place place(std::uint32_t instance, std::size_t bytes,
                std::span<const std::byte> begin) override;
    void take(std::uint32_t instance, std::span<const std::byte> message) override;

    AggregatorServer& server;
    int const number;
    FileDescriptor socket;
    std::string peer;
    TimePoint since;
    std::vector<std::byte> greeting;     // as long as it is known to be; then the proof
    std::size_t greeted = 0;             // bytes of it that are there
    std::optional<Challenge> challenge;  // that was sent
    bool stranger = true;                // has not greeted yet
    bool joined = false;
    MessagePath path;
    std::uint64_t placed = 0;  // a bit for each instance: a message is on its way to its place
    bool readable = false;
    std::string end;  // why it is to be closed; empty: it is not
  };

  void send(int connection, std::uint32_t instance, InaMessage const& message,
            std::shared_ptr<void const> memory) override;
  void send_copy(int connection, std::uint32_t instance,
                 std::span<const std::byte> message) override;
  void drop(int connection, std::string const& why) override;

  void accept_all();
  void serve(Connection& connection);
  void greet(Connection& connection);
  std::vector<std::byte> answer(Connection& connection);
  std::vector<std::byte> welcome(Connection& connection, ParsedGreeting const& greeting,
                                 std::string_view owner);
  UcxOffer take_offer(Connection& connection, UcxOffer const& offer);
  void open_ucx();
  void progress();
  void close_ended();
  void close_silent(TimePoint now);
  void watch_listener(bool on);
  void refuse_for_a_while(std::string const& why);

  AggregatorOptions const options_;
  Log const log_;
  InaHost host_;                      // outlives the bytes that connections still hold
  std::unique_ptr<UcxMessages> ucx_;  // null: over TCP only
  FileDescriptor listener_, events_, stop_;
  std::string address_;
  bool accepting_ = false;
  std::vector<std::unique_ptr<Connection>> connections_;  // [number]
  std::size_t open_ = 0;
  std::atomic<std::uint64_t> sent_bytes_ = 0, received_bytes_ = 0;
  std::size_t strangers_ = 0;  // have not greeted yet
  TimePoint now_;
  TimePoint accept_again_{};  // no connections are accepted before
};

}  // namespace sparsecomm
