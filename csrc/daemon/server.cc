#include "daemon/server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace sparsecomm {
namespace {

// Numbers of events beside those of connections.
constexpr std::uint64_t of_listener = ~std::uint64_t{0};
constexpr std::uint64_t of_stop = of_listener - 1;
constexpr std::uint64_t of_ucx = of_listener - 2;

// By which UCX chooses among its ways; it is no limit.
constexpr std::size_t usual_workers = 64;

// Messages of one connection, before the others have their turn.
constexpr int most_at_once = 16;

// Of UCX, before the sockets have their turn.
constexpr int most_polls = 32;

// How often deadlines are looked at, while there are any.
constexpr std::chrono::milliseconds tick{100};

bool control(FileDescriptor const& events, int operation, int file, std::uint32_t wanted,
             std::uint64_t number) {
  epoll_event event{.events = wanted, .data = {.u64 = number}};
  return ::epoll_ctl(events.get(), operation, file, &event) == 0;
}

Challenge draw_challenge() {
  Challenge challenge;
  ssize_t const drawn = ::getrandom(challenge.data(), challenge.size(), 0);
  require<Error>(drawn == std::ssize(challenge), "getrandom: ", system_text());
  return challenge;
}

}  // namespace

AggregatorServer::Connection::Connection(AggregatorServer& its_server, int its_number,
                                         FileDescriptor accepted, TimePoint now)
    : server(its_server),
      number(its_number),
      socket(std::move(accepted)),
      peer(peer_address(socket)),
      since(now),
      greeting(sizeof(InaGreeting)),
      path(socket.get()) {}

MessageSink::Place AggregatorServer::Connection::place(std::uint32_t instance, std::size_t bytes,
                                                       std::span<const std::byte> begin) {
  if (!end.empty()) return {};
  // Over UCX messages of several instances may be on their way, and no more than one of each.
  require<MalformedFrame>(
      instance >= AggregatorLink::most_instances || (placed >> instance & 1) == 0,
      "aggregation message: instance is ", instance, ", to which another message is on its way");
  auto place = server.host_.place(number, instance, bytes, begin, server.now_);
  if (!place.bytes.empty()) placed |= std::uint64_t{1} << instance;
  return place;
}

void AggregatorServer::Connection::take(std::uint32_t instance,
                                        std::span<const std::byte> message) {
  placed &= ~(std::uint64_t{1} << instance);
  server.received_bytes_.fetch_add(message.size(), std::memory_order_relaxed);
  if (end.empty()) server.host_.receive(number, instance, message, server.now_);
}

AggregatorServer::AggregatorServer(AggregatorOptions const& options, Log log)
    : options_(options),
      log_(std::move(log)),
      host_(options.memory, options.limit, *this, options.connections, *options.policy),
      listener_(listen_at(options.listen)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      address_(local_address(listener_)),
      now_(steady_clock().now()) {
  require<Error>(events_.open() && stop_.open(), "epoll or eventfd: ", system_text());
  stop_when(stop_);
  watch_listener(true);
  open_ucx();
}

void AggregatorServer::open_ucx() {
  std::string why_not;
  ucx_ = open_ucx_messages(options_.messages, usual_workers, &why_not);
  if (!ucx_) {
    if (!why_not.empty()) log_(concat("messages go over TCP: ", why_not));
    return;
  }
  require<Error>(control(events_, EPOLL_CTL_ADD, ucx_->file(), EPOLLIN, of_ucx),
                 "epoll_ctl: ", system_text());
  log_("messages go over UCX with workers that have the same release, over TCP with others");
}

void AggregatorServer::stop_when(FileDescriptor const& readable) {
  require<Error>(control(events_, EPOLL_CTL_ADD, readable.get(), EPOLLIN, of_stop),
                 "epoll_ctl: ", system_text());
}

void AggregatorServer::watch_listener(bool on) {
  if (on == accepting_) return;
  require<Error>(
      control(events_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listener_.get(), EPOLLIN, of_listener),
      "epoll_ctl: ", system_text());
  accepting_ = on;
}

void AggregatorServer::stop() noexcept {
  std::uint64_t const one = 1;
  [[maybe_unused]] ssize_t const written = ::write(stop_.get(), &one, sizeof(one));
}

void AggregatorServer::run() {
  std::array<epoll_event, 64> found;
  std::vector<std::size_t> ready;  // connections
  bool busy = false;
  for (;;) {
    // Who has more messages than its turn took is served again without a wait.
    bool const timed = busy || strangers_ > 0 || (!accepting_ && open_ < options_.connections);
    bool const at_once = !ready.empty() || (ucx_ && !ucx_->rest());
    int const timeout = at_once ? 0 : timed ? int(tick.count()) : -1;
    int const count = ::epoll_wait(events_.get(), found.data(), int(found.size()), timeout);
    require<Error>(count >= 0 || errno == EINTR, "epoll_wait: ", system_text());
    now_ = steady_clock().now();
    for (int i = 0; i < count; ++i) {
      auto const& event = found[static_cast<std::size_t>(i)];
      if (event.data.u64 == of_stop) return;
      if (event.data.u64 == of_listener) {
        accept_all();
        continue;
      }
      if (event.data.u64 == of_ucx) continue;
      auto const& connection = connections_[event.data.u64];
      if (!connection) continue;
      if ((event.events & EPOLLOUT) != 0) connection->path.flush();
      if ((event.events & ~std::uint32_t{EPOLLOUT}) == 0) continue;
      if (!std::exchange(connection->readable, true)) ready.push_back(event.data.u64);
    }
    progress();  // before the sockets, whose end may overtake messages
    for (std::size_t const number : ready) serve(*connections_[number]);
    busy = host_.expire(now_);
    close_silent(now_);
    close_ended();
    std::erase_if(ready, [this](std::size_t number) {
      return !connections_[number] || !connections_[number]->readable;
    });
  }
}

void AggregatorServer::accept_all() {
  while (open_ < options_.connections) {
    FileDescriptor socket;
    try {
      socket = accept_from(listener_);
    } catch (Error const& error) {
      return refuse_for_a_while(error.what());
    }
    if (!socket.open()) return;
    auto const place = std::ranges::find_if(connections_, [](auto const& taken) { return !taken; });
    auto const number = static_cast<std::size_t>(place - connections_.begin());
    if (place == connections_.end()) connections_.emplace_back();
    if (!control(events_, EPOLL_CTL_ADD, socket.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                 number)) {
      return refuse_for_a_while(concat("cannot watch a connection: ", system_text()));
    }
    connections_[number] =
        std::make_unique<Connection>(*this, static_cast<int>(number), std::move(socket), now_);
    ++open_;
    ++strangers_;
  }
  log_(concat("all ", options_.connections, " connections are taken; others wait"));
  watch_listener(false);
}

// The system has no room for more. The listener stays readable, so it is not watched meanwhile.
void AggregatorServer::refuse_for_a_while(std::string const& why) {
  log_(concat(why, "; connections wait"));
  accept_again_ = now_ + std::chrono::seconds(1);
  watch_listener(false);
}

// Whatever goes wrong ends this connection alone.
void AggregatorServer::serve(Connection& connection) {
  if (!connection.end.empty()) return;
  try {
    if (!connection.joined) greet(connection);
    if (!connection.joined) return;
    for (int i = 0; i < most_at_once; ++i) {
      if (connection.path.receive(connection)) continue;
      connection.readable = false;
      return;
    }
  } catch (std::exception const& error) {
    connection.end = error.what();
  }
}

void AggregatorServer::greet(Connection& connection) {
  auto const left = std::span(connection.greeting).subspan(connection.greeted);
  ssize_t const read = ::recv(connection.socket.get(), left.data(), left.size(), 0);
  if (read <= 0) {
    connection.readable = false;
    bool const later = read < 0 && (errno == EAGAIN || errno == EINTR);
    if (!later) connection.end = "it has ended without a greeting";
    return;
  }
  connection.greeted += static_cast<std::size_t>(read);
  if (connection.greeted < connection.greeting.size()) return;
  std::string problem;
  std::vector<std::byte> bytes;
  try {
    bytes = answer(connection);
    if (bytes.empty()) return;
  } catch (Error const& error) {
    problem = error.what();
    bytes = make_refusal(problem);
  }
  // A new socket takes so little at once.
  ssize_t const sent = ::send(connection.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent != std::ssize(bytes)) problem = "it does not take the answer to its greeting";
  if (problem.empty() && !connection.joined) return;  // it was challenged
  --strangers_;
  connection.stranger = false;
  connection.greeting = {};
  connection.end = problem;
  if (problem.empty()) return;
  // Were it closed with bytes unread, the answer might be lost.
  ::shutdown(connection.socket.get(), SHUT_WR);
  std::array<std::byte, 4096> unread;
  while (::recv(connection.socket.get(), unread.data(), unread.size(), 0) > 0) {
  }
}

// To what is there of the greeting; none: more is to come.
std::vector<std::byte> AggregatorServer::answer(Connection& connection) {
  auto const greeting = parse_greeting(std::span(connection.greeting).first<sizeof(InaGreeting)>());
  std::size_t const length = sizeof(InaGreeting) + greeting.introduction_bytes;
  connection.greeting.resize(length + (connection.challenge ? sizeof(Proof) : 0));
  if (connection.greeted < connection.greeting.size()) return {};
  if (!options_.authenticate) return welcome(connection, greeting, {});
  if (!connection.challenge) {
    connection.challenge = draw_challenge();
    connection.greeting.resize(length + sizeof(Proof));
    return make_challenge(*connection.challenge);
  }
  auto const said = std::span<const std::byte>(connection.greeting).first(length);
  Proof proof;
  std::ranges::copy(std::span(connection.greeting).subspan(length), proof.begin());
  std::string const owner =
      options_.authenticate(proof_message(*connection.challenge, said), proof);
  require<Error>(!owner.empty(), "the worker's token is none that this aggregator knows");
  return welcome(connection, greeting, owner);
}

std::vector<std::byte> AggregatorServer::welcome(Connection& connection,
                                                 ParsedGreeting const& greeting,
                                                 std::string_view owner) {
  auto const rest =
      std::span(connection.greeting).subspan(sizeof(InaGreeting), greeting.introduction_bytes);
  UcxOffer const own = take_offer(
      connection,
      {.introduction = std::string(reinterpret_cast<char const*>(rest.data()), rest.size()),
       .token = greeting.token});
  host_.join(connection.number, greeting.member, owner);
  connection.joined = true;
  return make_answer(own);
}

// What to offer in return; nothing: messages go over TCP.
UcxOffer AggregatorServer::take_offer(Connection& connection, UcxOffer const& offer) {
  std::string problem = "it offers no UCX";
  if (ucx_ && offer.token != 0) {
    std::uint64_t const token = UcxMessages::draw_token();
    try {
      connection.path.use(ucx_->connect(offer.introduction, token, offer.token, connection));
      return {.introduction = ucx_->introduction(), .token = token};
    } catch (MalformedFrame const&) {
      throw;
    } catch (Error const& error) {
      problem = error.what();
      log_(concat("messages of ", connection.peer, " go over TCP: ", problem));
    }
  }
  require<Error>(options_.messages.transport != MessageTransport::ucx,
                 "the aggregator was started with --transport ucx: ", problem);
  return {};
}

// Polling for longer would take the core from a worker, and yielding would give it to whoever
// computes: either makes messages ten times as slow where threads are more than cores.
void AggregatorServer::progress() {
  // A look at the sockets costs more than one at UCX.
  for (int i = 0; ucx_ && i < most_polls; ++i) ucx_->progress();
}

void AggregatorServer::send(int connection, std::uint32_t instance, InaMessage const& message,
                            std::shared_ptr<void const> memory) {
  sent_bytes_.fetch_add(message.size(), std::memory_order_relaxed);
  connections_[static_cast<std::size_t>(connection)]->path.send(instance, message,
                                                                std::move(memory));
}

void AggregatorServer::send_copy(int connection, std::uint32_t instance,
                                 std::span<const std::byte> message) {
  sent_bytes_.fetch_add(message.size(), std::memory_order_relaxed);
  connections_[static_cast<std::size_t>(connection)]->path.send_copy(instance, message);
}

void AggregatorServer::drop(int connection, std::string const& why) {
  connections_[static_cast<std::size_t>(connection)]->end = why;
}

void AggregatorServer::close_silent(TimePoint now) {
  if (strangers_ == 0) return;
  for (auto const& connection : connections_) {
    if (!connection || !connection->stranger) continue;
    if (now - connection->since < options_.greeting || !connection->end.empty()) continue;
    connection->end = concat("no greeting within ",
                             std::chrono::duration<double>(options_.greeting).count(), " s");
  }
}

// A worker that leaves may have messages sent to others, of which some may break.
void AggregatorServer::close_ended() {
  for (bool again = true; std::exchange(again, false);) {
    for (auto& connection : connections_) {
      if (!connection) continue;
      if (connection->end.empty()) connection->end = connection->path.error();
      if (connection->end.empty()) continue;
      log_(concat("connection from ", connection->peer, " closed: ", connection->end));
      if (connection->stranger) --strangers_;
      auto const closed = std::move(connection);
      --open_;
      host_.leave(closed->number, closed->end);
      again = true;
    }
  }
  if (open_ < options_.connections && now_ >= accept_again_) watch_listener(true);
}

}  // namespace sparsecomm
