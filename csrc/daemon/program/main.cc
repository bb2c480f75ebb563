// sparsecomm-aggregator: the program.

#include <sys/resource.h>
#include <sys/signalfd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>

#include "daemon/command_line.h"
#include "daemon/program/tokens.h"
#include "daemon/server.h"
#include "transport/process.h"

namespace sparsecomm {
namespace {

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

// As many files as the system lets this program have.
void raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int serve(std::span<char const* const> arguments) {
  AggregatorCommand command = parse_command_line(arguments);
  if (command.help) {
    std::fputs(aggregator_usage().c_str(), stdout);
    return 0;
  }
  raise_file_limit();
  std::string const problem = descriptor_problem(command.options.connections + 16);
  require<Error>(problem.empty(), "--connections ", command.options.connections, ": ", problem);
  FileDescriptor const signals = watch_signals();  // first, so that UCX's threads do not take them
  auto const log = [](std::string const& line) {
    std::fprintf(stderr, "sparsecomm-aggregator: %s\n", line.c_str());
  };
  std::optional<TokenFile> tokens;
  if (!command.tokens.empty()) {
    tokens.emplace(command.tokens, log);
    command.options.authenticate = [&](std::span<const std::byte> message, Proof const& proof) {
      return tokens->owner_of(message, proof);
    };
  }
  AggregatorServer server(command.options, log);
  server.stop_when(signals);
  std::printf("listening at %s\n", server.address().c_str());
  std::fflush(stdout);
  server.run();
  return 0;
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
