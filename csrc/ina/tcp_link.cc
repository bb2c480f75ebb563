#include "ina/tcp_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <utility>
#include <vector>

#include "ina/greeting.h"
#include "ina/message_path.h"
#include "ina/socket.h"
#include "transport/fork_guard.h"

namespace sparsecomm {
namespace {

void read_all(int file, std::span<std::byte> to, Deadline const& deadline) {
  while (!to.empty()) {
    require<AddressError>(wait_readable(file, deadline), "no answer to the greeting within ",
                          deadline.allowance_seconds(), " s: is it an aggregator?");
    ssize_t const read = ::recv(file, to.data(), to.size(), 0);
    if (read < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    require<AddressError>(read > 0,
                          "the connection has been closed without an answer to the "
                          "greeting: is it an aggregator?");
    to = to.subspan(static_cast<std::size_t>(read));
  }
}

std::string read_text(int file, std::size_t bytes, Deadline const& deadline) {
  std::string text(bytes, '\0');
  read_all(file, std::as_writable_bytes(std::span(text)), deadline);
  return text;
}

ParsedAnswer read_answer(int file, Deadline const& deadline) {
  std::array<std::byte, sizeof(InaAnswer)> bytes;
  read_all(file, bytes, deadline);
  return parse_answer(bytes);
}

// The socket is new, and takes so little at once.
void send_all(int file, std::span<const std::byte> bytes) {
  ssize_t const sent = ::send(file, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  require<AddressError>(sent == std::ssize(bytes),
                        "the greeting could not be sent: ", system_text());
}

// Says who connects, shows the token if it is asked for, and returns what the aggregator offers for
// UCX.
UcxOffer greet(int file, JobMember const& member, UcxOffer const& offer, Prover const& prove,
               Deadline const& deadline) {
  auto const greeting = make_greeting(member, offer);
  send_all(file, greeting);
  ParsedAnswer answer = read_answer(file, deadline);
  if (answer.challenge_bytes > 0) {
    Challenge challenge;
    read_all(file, challenge, deadline);
    require<AddressError>(prove != nullptr,
                          "it asks for a token, and there is none here: name a file that holds it");
    send_all(file, prove(proof_message(challenge, greeting)));
    answer = read_answer(file, deadline);
    require<MalformedFrame>(answer.challenge_bytes == 0, "greeting: challenge_bytes is ",
                            answer.challenge_bytes, ", must be 0 after a proof");
  }
  std::string const text = read_text(file, answer.text_bytes, deadline);
  require<AddressError>(text.empty(), text);
  return {.introduction = read_text(file, answer.introduction_bytes, deadline),
          .token = answer.token};
}

class Link final : public UnconnectedLink {
 public:
  Link(std::span<const std::string> addresses, MessageOptions options, Prover prove)
      : options_(std::move(options)),
        prove_(std::move(prove)),
        events_(::epoll_create1(EPOLL_CLOEXEC)),
        interruption_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    require_addresses(addresses);
    require<Error>(events_.open() && interruption_.open(), "epoll or eventfd: ", system_text());
    watch(interruption_.get(), EPOLLIN, no_endpoint);
    for (auto const& address : addresses) endpoints_.push_back(std::make_unique<Endpoint>(address));
    guard_ = ForkGuard(events_.get());
  }
  // In a forked child, where the guard has closed them, the sockets' numbers are others' files.
  ~Link() override {
    for (auto const& endpoint : endpoints_) {
      if (!endpoint->path) continue;
      if (process_ == ::getpid()) {
        endpoint->lose("it was closed");
      } else {
        endpoint->path.reset();
        endpoint->socket.release();
      }
    }
  }

  void connect(JobMember const& member, Deadline const& deadline) override {
    told_ = {};
    // What they have of UCX goes before it.
    for (auto& endpoint : endpoints_) endpoint = std::make_unique<Endpoint>(endpoint->address);
    ucx_ = open_ucx_messages(options_, endpoints_.size());
    for (int i = 0; i < size(); ++i) open(i, member, deadline);
    bool const used = std::ranges::any_of(
        endpoints_, [](auto const& endpoint) { return endpoint->path->over_ucx(); });
    if (!used) ucx_.reset();
    if (ucx_) watch(ucx_->file(), EPOLLIN, no_endpoint);
  }

  void reconnect(int aggregator, JobMember const& member, Deadline const& deadline) override {
    if (told_.endpoint == &at(aggregator)) told_ = {};
    auto fresh = std::make_unique<Endpoint>(at(aggregator).address);
    endpoints_[static_cast<std::size_t>(aggregator)] = std::move(fresh);
    open(aggregator, member, deadline);
  }

  int size() const override { return static_cast<int>(endpoints_.size()); }
  std::string const& address(int aggregator) const override { return at(aggregator).address; }
  std::string const& loss(int aggregator) const override { return at(aggregator).loss; }

  void send(int aggregator, std::uint32_t instance, InaMessage const& message) override {
    Endpoint& endpoint = at(aggregator);
    if (endpoint.path) endpoint.path->send(instance, message);
  }

  bool flushed(int aggregator) const override {
    auto const& path = at(aggregator).path;
    return !path || path->flushed() || !path->error().empty();
  }
  bool flush(int aggregator, Deadline const& deadline) override {
    while (!flushed(aggregator)) {
      require_wanted();
      if (!wait(deadline)) return false;
    }
    return true;
  }

  Event next(Deadline const& deadline) override {
    if (told_.arrival) told_.endpoint->unused.push_back(std::move(told_.arrival));
    for (;;) {
      require_wanted();
      for (std::size_t i = 0; i < endpoints_.size(); ++i) {
        std::size_t const index = (first_ + i) % endpoints_.size();
        Endpoint& endpoint = *endpoints_[index];
        read(endpoint);
        if (endpoint.ready()) {
          first_ = (index + 1) % endpoints_.size();
          told_ = {&endpoint, endpoint.take_first()};
          return {Event::Kind::message, static_cast<int>(index), told_.arrival->instance,
                  std::span(told_.arrival->buffer).first(told_.arrival->bytes)};
        }
        if (std::exchange(endpoint.to_be_told, false)) {
          return {Event::Kind::lost, static_cast<int>(index), 0, {}};
        }
      }
      if (!wait(deadline)) return {Event::Kind::late, 0, 0, {}};
    }
  }

  void close(int aggregator, std::string const& why) override {
    Endpoint& endpoint = at(aggregator);
    if (endpoint.path) endpoint.lose(why);
  }

  void interrupt() noexcept override {
    interrupted_ = true;
    std::uint64_t const one = 1;
    [[maybe_unused]] ssize_t const written = ::write(interruption_.get(), &one, sizeof(one));
  }

 private:
  struct Arrival {
    std::vector<std::byte> buffer;
    std::size_t bytes = 0;
    std::uint32_t instance = 0;
    bool complete = false;
  };

  struct Endpoint final : MessageSink {
    explicit Endpoint(std::string text) : address(std::move(text)) {}
    void open(FileDescriptor connected) {
      socket = std::move(connected);
      path.emplace(socket.get());
    }

    // Several may come at once over UCX. An instance has an update and a refusal on their way at
    // most.
    Place place(std::uint32_t number, std::size_t bytes, std::span<const std::byte>) override {
      require<MalformedFrame>(number < most_instances, "aggregation message: instance is ", number,
                              ", must be less than ", most_instances);
      require<MalformedFrame>(bytes <= longest_message, "aggregation message: length is ", bytes,
                              ", must be at most ", longest_message);
      require<MalformedFrame>(count < order.size(), "aggregation message: ", count,
                              " messages wait, more than there can be");
      if (unused.empty()) unused.push_back(std::make_shared<Arrival>());
      auto& held = order[(begin + count++) % order.size()] = std::move(unused.back());
      unused.pop_back();
      Arrival& arrival = *held;
      if (arrival.buffer.size() < bytes) arrival.buffer.resize(bytes);
      arrival.bytes = bytes;
      arrival.instance = number;
      arrival.complete = false;
      return {std::span(arrival.buffer).first(bytes), held};
    }
    void take(std::uint32_t, std::span<const std::byte> message) override {
      for (std::size_t i = 0; i < count; ++i) {
        Arrival& arrival = *order[(begin + i) % order.size()];
        if (arrival.buffer.data() == message.data()) arrival.complete = true;
      }
    }
    // Whether there is a message to tell of, in the order in which they were sent.
    bool ready() const { return path && count > 0 && order[begin]->complete; }
    std::shared_ptr<Arrival> take_first() {
      auto first = std::move(order[begin]);
      begin = (begin + 1) % order.size();
      --count;
      return first;
    }
    // The other side is told, even if a program that was forked from this one holds the socket.
    void lose(std::string const& why) {
      loss = why;
      path.reset();
      ::shutdown(socket.get(), SHUT_RDWR);
      socket = FileDescriptor();
    }

    std::string address;
    FileDescriptor socket;
    std::optional<MessagePath> path;  // none before it is connected, and once it is lost
    std::string loss;
    bool readable = false, to_be_told = false;
    std::vector<std::shared_ptr<Arrival>> unused;
    std::array<std::shared_ptr<Arrival>, std::size_t{2} * most_instances> order;  // a ring
    std::size_t begin = 0, count = 0;
  };

  // Ends what connect() waits for after interrupt().
  class Wanted final : public Interrupt {
   public:
    Wanted(Link const& link, Deadline const& deadline) : link_(link), deadline_(deadline) {}

   private:
    void check() override {
      link_.require_wanted();
      deadline_.poll_interrupt(steady_clock().now());
    }

    Link const& link_;
    Deadline const& deadline_;
  };

  // Connects an endpoint that is as it was made, and joins the job there.
  void open(int aggregator, JobMember const& member, Deadline const& deadline) {
    Wanted wanted(*this, deadline);
    Deadline const limit(steady_clock(),
                         std::chrono::round<std::chrono::milliseconds>(deadline.remaining()),
                         &wanted);
    Endpoint& endpoint = at(aggregator);
    require_wanted();
    endpoint.open(connect_to(endpoint.address, limit));
    try {
      join(endpoint, member, limit);
      watch(endpoint.socket.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
            static_cast<std::uint64_t>(aggregator));
    } catch (Interrupted const&) {
      throw;
    } catch (Error const& error) {
      endpoint.lose(error.what());
      throw AddressError(concat("aggregator ", endpoint.address, ": ", error.what()));
    }
  }

  // Greets, and agrees on the way of messages.
  void join(Endpoint& endpoint, JobMember const& member, Deadline const& deadline) {
    UcxOffer own;
    if (ucx_) own = {.introduction = ucx_->introduction(), .token = UcxMessages::draw_token()};
    UcxOffer const other = greet(endpoint.socket.get(), member, own, prove_, deadline);
    if (ucx_ && other.token != 0) {
      endpoint.path->use(ucx_->connect(other.introduction, own.token, other.token, endpoint));
    }
    require<AddressError>(endpoint.path->over_ucx() || options_.transport != MessageTransport::ucx,
                          "it does not take messages over UCX: its log says why; start it with "
                          "--transport ucx or auto, or use TCP here");
  }

  Endpoint& at(int aggregator) const {
    require(aggregator >= 0 && aggregator < size(), "aggregator is ", aggregator,
            ", must be less than ", size());
    return *endpoints_[static_cast<std::size_t>(aggregator)];
  }

  void watch(int file, std::uint32_t events, std::uint64_t number) {
    epoll_event event{.events = events, .data = {.u64 = number}};
    require<Error>(::epoll_ctl(events_.get(), EPOLL_CTL_ADD, file, &event) == 0,
                   "epoll_ctl: ", system_text());
  }

  // Reads its socket, unless it has a message to tell of.
  void read(Endpoint& endpoint) {
    if (!endpoint.path || endpoint.ready()) return;
    if (endpoint.readable) {
      // The end of the socket may overtake messages.
      while (endpoint.path->over_ucx() && ucx_->progress()) {
      }
      if (endpoint.ready() || endpoint.path->receive(endpoint)) return;
      endpoint.readable = false;
    }
    if (endpoint.path->error().empty()) return;
    endpoint.lose(std::string(endpoint.path->error()));
    endpoint.to_be_told = true;
  }

  void require_wanted() const {
    if (interrupted_) throw Interrupted("the wait for an aggregator was interrupted", {});
  }

  // False: the deadline has passed.
  bool wait(Deadline const& deadline) {
    for (;;) {
      bool happened = false;
      // A look at the sockets costs more than one at UCX.
      for (int i = 0; ucx_ && i < 32 && !happened; ++i) happened = ucx_->progress();
      // Polling for longer would take the core from an aggregator or a computation: with more
      // threads than cores it makes messages ten times as slow.
      bool const sleep = !happened && (!ucx_ || ucx_->rest());
      happened = look(sleep ? poll_milliseconds(deadline) : 0) || happened;
      deadline.poll_interrupt(steady_clock().now());
      if (happened) return true;
      require_wanted();
      if (deadline.passed()) return false;
    }
  }

  // Whether anything has happened to a socket, UCX or interruption_ within so many milliseconds.
  bool look(int timeout) {
    std::array<epoll_event, 16> found;
    int const count = ::epoll_wait(events_.get(), found.data(), int(found.size()), timeout);
    for (int i = 0; i < count; ++i) {
      auto const& event = found[static_cast<std::size_t>(i)];
      if (event.data.u64 == no_endpoint) continue;
      Endpoint& endpoint = *endpoints_[event.data.u64];
      if (!endpoint.path) continue;
      if ((event.events & EPOLLOUT) != 0) endpoint.path->flush();
      if ((event.events & ~std::uint32_t{EPOLLOUT}) != 0) endpoint.readable = true;
    }
    return count > 0;
  }

  static constexpr std::uint64_t no_endpoint = ~std::uint64_t{0};

  pid_t const process_ = ::getpid();
  MessageOptions const options_;
  Prover const prove_;
  FileDescriptor events_, interruption_;
  std::atomic<bool> interrupted_ = false;
  std::unique_ptr<UcxMessages> ucx_;  // null: none is used
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  ForkGuard guard_;
  std::size_t first_ = 0;  // asked first
  struct {
    Endpoint* endpoint = nullptr;
    std::shared_ptr<Arrival> arrival;
  } told_;  // what the caller has
};

}  // namespace

void require_addresses(std::span<const std::string> addresses) {
  require(!addresses.empty(), "no address of an aggregator; give one or more, HOST:PORT");
  for (std::string const& address : addresses) {
    HostPort const parts = HostPort::parse(address);
    require(!parts.host.empty() && parts.port != "0", "address is \"", address,
            "\", must name a host and a port of an aggregator");
    require(std::ranges::count(addresses, address) == 1, "the address ", address,
            " of an aggregator is given twice");
  }
}

std::shared_ptr<UnconnectedLink> make_tcp_link(std::span<const std::string> addresses,
                                               MessageOptions const& options, Prover prove) {
  return std::make_shared<Link>(addresses, options, std::move(prove));
}

std::shared_ptr<AggregatorLink> connect_aggregators(std::span<const std::string> addresses,
                                                    JobMember const& member,
                                                    Deadline const& deadline,
                                                    MessageOptions const& options, Prover prove) {
  auto link = make_tcp_link(addresses, options, std::move(prove));
  link->connect(member, deadline);
  return link;
}

}  // namespace sparsecomm
