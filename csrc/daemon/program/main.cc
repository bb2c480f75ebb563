// sparsecomm-aggregator: the program.

#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "daemon/command_line.h"
#include "daemon/program/control_socket.h"
#include "daemon/program/http_server.h"
#include "daemon/program/log.h"
#include "daemon/program/service.h"
#include "daemon/program/settings_file.h"
#include "daemon/program/tokens.h"
#include "daemon/server.h"
#include "transport/process.h"

namespace sparsecomm {
namespace {

constexpr std::size_t other_descriptors = 32 + 2 * HttpServer::most_connections;

// Readable once a signal has come that ends the program.
FileDescriptor watch_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);  // of who read the log
  return FileDescriptor(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

bool take_signal(FileDescriptor const& signals) {
  signalfd_siginfo signal;
  return ::read(signals.get(), &signal, sizeof(signal)) == sizeof(signal);
}

// As many files as the system lets this program have.
void raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// A socket's file, which goes with the program.
class ControlFile {
 public:
  explicit ControlFile(std::string path) : path_(std::move(path)) {}
  ControlFile(ControlFile const&) = delete;
  ControlFile& operator=(ControlFile const&) = delete;
  ~ControlFile() { ::unlink(path_.c_str()); }

 private:
  std::string const path_;
};

int serve(std::span<char const* const> arguments) {
  AggregatorCommand command = parse_command_line(arguments, read_settings);
  if (command.help) {
    std::fputs(aggregator_usage().c_str(), stdout);
    return 0;
  }
  raise_file_limit();
  std::string const problem = descriptor_problem(command.options.connections + other_descriptors);
  require<Error>(problem.empty(), "--connections ", command.options.connections, ": ", problem);
  FileDescriptor const signals = watch_signals();  // first, so that no other thread takes them
  ProgramLog program_log(command.log);
  Log const log = [&](LogEntry const& entry) { program_log.write(entry); };
  std::optional<TokenFile> tokens;
  if (!command.tokens.empty()) {
    tokens.emplace(command.tokens, log);
    command.options.authenticate = [&](std::span<const std::byte> message, Proof const& proof) {
      return tokens->owner_of(message, proof);
    };
  }
  if (command.check) return 0;
  AggregatorServer server(command.options, log);
  server.watch(signals, [&, draining = false]() mutable {
    while (take_signal(signals)) {
      if (std::exchange(draining, true)) return server.stop();
      server.drain(command.drain);
    }
  });
  std::vector<HttpListener> listeners;
  std::optional<ControlFile> control;
  std::string http;
  if (!command.http.empty()) {
    listeners.push_back({.socket = listen_at(command.http)});
    http = local_address(listeners.back().socket);
  }
  if (!command.control.empty()) {
    listeners.push_back({.socket = listen_at_path(command.control), .control = true});
    control.emplace(command.control);
  }
  Service const service(server, [&] { return tokens ? tokens->size() : 0; }, command.drain);
  std::optional<HttpServer> watched;
  if (!listeners.empty()) {
    watched.emplace(std::move(listeners),
                    [&](HttpRequest const& request) { return service.answer(request); });
  }
  std::printf("listening at %s\n", server.address().c_str());
  if (!http.empty()) std::printf("http at %s\n", http.c_str());
  std::fflush(stdout);
  log({.text = concat("listening at ", server.address())});
  try {
    server.run();
    return 0;
  } catch (std::exception const& error) {
    log({.level = LogLevel::error, .text = concat("it has failed: ", error.what())});
    return 1;
  }
}

}  // namespace
}  // namespace sparsecomm

int main(int count, char** arguments) {
  try {
    return sparsecomm::serve(std::span(arguments, static_cast<std::size_t>(count)).subspan(1));
  } catch (std::exception const& error) {
    std::fprintf(stderr, "sparsecomm-aggregator: %s\n", error.what());
    return 2;
  }
}
