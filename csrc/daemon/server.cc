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
constexpr std::uint64_t of_ucx = of_listener - 1;
constexpr std::uint64_t of_watched = std::uint64_t{1} << 32;  // and more

// By which UCX chooses among its ways; it is no limit.
constexpr std::size_t usual_workers = 64;

// Messages of one connection, before the others have their turn.
constexpr int most_at_once = 16;

// Of UCX, before the sockets have their turn.
constexpr int most_polls = 32;

// How often deadlines are looked at, while there are any, and whether jobs are idle.
constexpr std::chrono::milliseconds tick{100}, idle_tick{1000};

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

InaLimits limits_of(AggregatorOptions const& options) {
  return {.memory = options.memory,
          .job_memory = options.job_memory == 0 ? options.memory : options.job_memory,
          .round = options.limit,
          .idle = options.idle,
          .workers = options.connections};
}

std::string seconds_text(Duration time) {
  return concat(std::chrono::duration<double>(time).count());
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
  if (end.empty()) server.host_.receive(number, instance, message, server.now_);
}

AggregatorServer::AggregatorServer(AggregatorOptions const& options, Log log)
    : options_(options),
      log_(std::move(log)),
      host_(limits_of(options), *this, *options.policy),
      listener_(listen_at(options.listen)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      posted_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      address_(local_address(listener_)),
      now_(steady_clock().now()) {
  require<Error>(events_.open() && posted_event_.open(), "epoll or eventfd: ", system_text());
  watch(posted_event_, [this] { take_posted(); });
  watch_listener(true);
  open_ucx();
}

void AggregatorServer::open_ucx() {
  std::string why_not;
  ucx_ = open_ucx_messages(options_.messages, usual_workers, &why_not);
  if (!ucx_) {
    if (!why_not.empty()) log(LogLevel::warning, concat("messages go over TCP: ", why_not));
    return;
  }
  require<Error>(control(events_, EPOLL_CTL_ADD, ucx_->file(), EPOLLIN, of_ucx),
                 "epoll_ctl: ", system_text());
  log(LogLevel::info,
      "messages go over UCX with workers that have the same release, over TCP with others");
}

void AggregatorServer::watch(FileDescriptor const& file, std::function<void()> readable) {
  require<Error>(control(events_, EPOLL_CTL_ADD, file.get(), EPOLLIN, of_watched + watched_.size()),
                 "epoll_ctl: ", system_text());
  watched_.push_back(std::move(readable));
}

void AggregatorServer::watch_listener(bool on) {
  if (on == accepting_) return;
  require<Error>(
      control(events_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listener_.get(), EPOLLIN, of_listener),
      "epoll_ctl: ", system_text());
  accepting_ = on;
}

void AggregatorServer::stop() noexcept {
  stop_.store(true, std::memory_order_relaxed);
  ::eventfd_write(posted_event_.get(), 1);
}

bool AggregatorServer::post(std::function<void()> task) {
  {
    std::lock_guard const lock(posted_mutex_);
    if (ended_) return false;
    posted_.push_back(std::move(task));
  }
  ::eventfd_write(posted_event_.get(), 1);
  return true;
}

void AggregatorServer::take_posted() {
  eventfd_t count = 0;
  ::eventfd_read(posted_event_.get(), &count);
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard const lock(posted_mutex_);
    tasks.swap(posted_);
  }
  for (auto const& task : tasks) task();
}

void AggregatorServer::drain(Duration limit) {
  TimePoint const by = now_ + std::clamp(limit, Duration::zero(), longest_duration);
  drained_by_ = std::min(by, drained_by_.value_or(by));
  log(LogLevel::info, concat("draining: no more jobs are taken; it ends when the ", host_.jobs(),
                             " that are here have ended, or in ", seconds_text(limit), " s"));
}

bool AggregatorServer::over() {
  if (stop_.load(std::memory_order_relaxed)) return true;
  if (!drained_by_ || (host_.jobs() > 0 && now_ < *drained_by_)) return false;
  log(LogLevel::info, concat("drained; jobs that have not ended: ", host_.jobs()));
  return true;
}

bool AggregatorServer::end_job(JobId const& job) {
  return host_.end(job, InaHost::DropCause::ended, "the job was ended by an operator");
}

AggregatorReport AggregatorServer::report() const {
  return {.counts = host_.counts(),
          .begun_jobs = begun_jobs_,
          .closed = closed_,
          .jobs = host_.reports(),
          .connections = open_,
          .most_connections = options_.connections,
          .memory = host_.admission().taken(),
          .most_memory = options_.memory,
          .now = now_,
          .draining = drained_by_.has_value()};
}

void AggregatorServer::log(LogLevel level, std::string text,
                           decltype(LogEntry::fields) fields) const {
  log_({.level = level, .text = std::move(text), .fields = std::move(fields)});
}

void AggregatorServer::run() {
  // However it ends, nobody is to wait for an answer.
  struct End {
    ~End() {
      std::vector<std::function<void()>> dropped;
      std::lock_guard const lock(server.posted_mutex_);
      server.ended_ = true;
      dropped.swap(server.posted_);
    }
    AggregatorServer& server;
  } const end{*this};
  serve_all();
}

void AggregatorServer::serve_all() {
  std::array<epoll_event, 64> found;
  std::vector<std::size_t> ready;  // connections
  bool busy = false;
  while (!over()) {
    // Who has more messages than its turn took is served again without a wait.
    bool const timed =
        busy || strangers_ > 0 || drained_by_ || (!accepting_ && open_ < options_.connections);
    bool const at_once = !ready.empty() || (ucx_ && !ucx_->rest());
    bool const reaping = open_ > 0 && options_.idle < longest_duration;
    int const timeout = at_once   ? 0
                        : timed   ? int(tick.count())
                        : reaping ? int(idle_tick.count())
                                  : -1;
    int const count = ::epoll_wait(events_.get(), found.data(), int(found.size()), timeout);
    require<Error>(count >= 0 || errno == EINTR, "epoll_wait: ", system_text());
    now_ = steady_clock().now();
    for (int i = 0; i < count; ++i) {
      auto const& event = found[static_cast<std::size_t>(i)];
      std::uint64_t const number = event.data.u64;
      if (number == of_listener) {
        accept_all();
        continue;
      }
      if (number == of_ucx) continue;
      if (number >= of_watched) {
        watched_[number - of_watched]();
        continue;
      }
      auto const& connection = connections_[number];
      if (!connection) continue;
      if ((event.events & EPOLLOUT) != 0) connection->path.flush();
      if ((event.events & ~std::uint32_t{EPOLLOUT}) == 0) continue;
      if (!std::exchange(connection->readable, true)) ready.push_back(number);
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
  log(LogLevel::warning,
      concat("all ", options_.connections, " connections are taken; others wait"));
  watch_listener(false);
}

// The system has no room for more. The listener stays readable, so it is not watched meanwhile.
void AggregatorServer::refuse_for_a_while(std::string const& why) {
  log(LogLevel::error, concat(why, "; connections wait"));
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
    if (connection.joined) connection.cause = CloseCause::protocol;
  }
}

void AggregatorServer::greet(Connection& connection) {
  auto const left = std::span(connection.greeting).subspan(connection.greeted);
  ssize_t const read = ::recv(connection.socket.get(), left.data(), left.size(), 0);
  if (read <= 0) {
    connection.readable = false;
    if (read < 0 && (errno == EAGAIN || errno == EINTR)) return;
    // One that was challenged has no token, most likely.
    connection.cause = connection.challenge ? CloseCause::token : CloseCause::left;
    connection.end = "it has ended without a greeting";
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
  connection.cause = CloseCause::token;
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
  connection.cause = CloseCause::refused;
  require<Error>(!drained_by_ || host_.has(greeting.member.job),
                 "the aggregator is draining and takes no more jobs; use another");
  auto const rest =
      std::span(connection.greeting).subspan(sizeof(InaGreeting), greeting.introduction_bytes);
  UcxOffer const own = take_offer(
      connection,
      {.introduction = std::string(reinterpret_cast<char const*>(rest.data()), rest.size()),
       .token = greeting.token});
  host_.join(connection.number, greeting.member, now_, owner);
  connection.joined = true;
  connection.cause = CloseCause::left;
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
      log(LogLevel::warning, concat("messages of ", connection.peer, " go over TCP: ", problem),
          {{"peer", connection.peer}});
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
  connections_[static_cast<std::size_t>(connection)]->path.send(instance, message,
                                                                std::move(memory));
}

void AggregatorServer::send_copy(int connection, std::uint32_t instance,
                                 std::span<const std::byte> message) {
  connections_[static_cast<std::size_t>(connection)]->path.send_copy(instance, message);
}

void AggregatorServer::drop(int connection, InaHost::DropCause cause, std::string const& why) {
  Connection& dropped = *connections_[static_cast<std::size_t>(connection)];
  dropped.end = why;
  dropped.cause = cause == InaHost::DropCause::replaced ? CloseCause::replaced
                  : cause == InaHost::DropCause::idle   ? CloseCause::idle
                                                        : CloseCause::ended;
}

void AggregatorServer::begun(InaJobReport const& job) {
  ++begun_jobs_;
  log(LogLevel::info,
      concat("job ", name(job.id), " of ", job.workers, " workers has begun",
             job.owner.empty() ? "" : ", with the token of ", job.owner),
      {{"job", name(job.id)}, {"owner", job.owner}, {"workers", concat(job.workers)}});
}

void AggregatorServer::ended(InaJobReport const& job) {
  std::string const seconds = seconds_text(now_ - job.begun);
  log(LogLevel::info,
      concat("job ", name(job.id), " has ended after ", job.counts.operations, " operations and ",
             seconds, " s"),
      {{"job", name(job.id)},
       {"owner", job.owner},
       {"operations", concat(job.counts.operations)},
       {"received_bytes", concat(job.counts.received_bytes)},
       {"sent_bytes", concat(job.counts.sent_bytes)},
       {"seconds", seconds}});
}

void AggregatorServer::refused(JobId const& job, RefusalReason reason, std::string_view text) {
  log(LogLevel::warning, concat("job ", name(job), ": ", text),
      {{"job", name(job)}, {"reason", std::string(name(reason))}});
}

void AggregatorServer::close_silent(TimePoint now) {
  if (strangers_ == 0) return;
  for (auto const& connection : connections_) {
    if (!connection || !connection->stranger) continue;
    if (now - connection->since < options_.greeting || !connection->end.empty()) continue;
    connection->end = concat("no greeting within ", seconds_text(options_.greeting), " s");
    connection->cause = CloseCause::silent;
  }
}

// A worker that leaves may have messages sent to others, of which some may break.
void AggregatorServer::close_ended() {
  for (bool again = true; std::exchange(again, false);) {
    for (auto& connection : connections_) {
      if (!connection) continue;
      if (connection->end.empty()) {
        connection->end = connection->path.error();
        if (connection->path.malformed()) connection->cause = CloseCause::protocol;
      }
      if (connection->end.empty()) continue;
      auto const& entry = close_cause_table[static_cast<std::size_t>(connection->cause)];
      ++closed_[static_cast<std::size_t>(connection->cause)];
      log(connection->cause == CloseCause::left ? LogLevel::info : LogLevel::warning,
          concat("connection from ", connection->peer, " closed: ", connection->end),
          {{"peer", connection->peer}, {"cause", std::string(entry.name)}});
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
