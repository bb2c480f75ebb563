// sparsecomm-aggregator: the program.

#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <thread>

#include "daemon/command_line.h"
#include "daemon/server.h"
#include "transport/process.h"

namespace {

// Stops the server at the first of these signals, which must be blocked in all threads.
void stop_at(sigset_t const& signals, sparsecomm::AggregatorServer& server) {
  int signal = 0;
  ::sigwait(&signals, &signal);
  server.stop();
}

int serve(std::span<char const* const> arguments) {
  using namespace sparsecomm;
  AggregatorCommand const command = parse_command_line(arguments);
  if (command.help) {
    std::fputs(aggregator_usage().c_str(), stdout);
    return 0;
  }
  std::string const problem = descriptor_problem(command.options.connections + 16);
  require<Error>(problem.empty(), "--connections ", command.options.connections, ": ", problem);
  AggregatorServer server(command.options, [](std::string const& line) {
    std::fprintf(stderr, "sparsecomm-aggregator: %s\n", line.c_str());
  });
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread waiting(stop_at, std::cref(signals), std::ref(server));
  std::printf("listening at %s\n", server.address().c_str());
  std::fflush(stdout);
  server.run();
  waiting.join();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return serve(std::span(arguments, static_cast<std::size_t>(count)).subspan(1));
  } catch (std::exception const& error) {
    std::fprintf(stderr, "sparsecomm-aggregator: %s\n", error.what());
    return 2;
  }
}
