#include "daemon/command_line.h"

#include <charconv>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

namespace sparsecomm {
namespace {

template <class T>
T parse_number(std::string_view name, std::string_view text, T least, T most) {
  T value{};
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(
      error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most,
      name, " is \"", text, "\", must be ", least, " to ", most);
  return value;
}

}  // namespace

std::size_t parse_bytes(std::string_view text) {
  constexpr std::pair<std::string_view, int> units[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
  std::string_view digits = text;
  int shift = 0;
  for (auto const& [unit, bits] : units) {
    if (!text.ends_with(unit)) continue;
    digits.remove_suffix(unit.size());
    shift = bits;
  }
  std::size_t value = 0;
  auto const [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  require(error == std::errc{} && end == digits.data() + digits.size() && value > 0 &&
              value <= std::numeric_limits<std::size_t>::max() >> shift,
          "a size is \"", text, "\", must be a number of bytes, or of KiB, MiB or GiB: 256MiB");
  return value << shift;
}

std::string aggregator_usage() {
  AggregatorOptions const options;
  return concat(
      "usage: sparsecomm-aggregator --listen HOST:PORT [--memory SIZE] [--limit SECONDS]\n"
      "                             [--connections COUNT] [--transport auto|tcp|ucx]\n"
      "                             [--ucx-library FILE] [--tokens FILE]\n"
      "\n"
      "Sums blocks of tensors for the workers of training jobs (in-network aggregation).\n"
      "\n"
      "  --listen HOST:PORT   where workers connect; no host: all IPv4 addresses of this machine,\n"
      "                       [::]: those of IPv6 too; port 0: a free one, which the first line "
      "of\n"
      "                       the output names\n"
      "  --memory SIZE        what operations may take together, in bytes, KiB, MiB or GiB; a\n"
      "                       job takes up to 1 MiB beside that, and 600 bytes for each worker\n"
      "                       (default: ",
      options.memory >> 20,
      "MiB)\n"
      "  --limit SECONDS      after which an operation fails that a worker does not go on with;\n"
      "                       counted anew with every round\n"
      "                       (default: ",
      std::chrono::duration_cast<std::chrono::seconds>(options.limit).count(),
      ")\n"
      "  --connections COUNT  at once; others wait (default: ",
      options.connections,
      ")\n"
      "  --transport WAY      of messages: tcp; ucx (RDMA, shared memory or its own TCP), or "
      "auto:\n"
      "                       RDMA or shared memory over UCX with the workers that can, TCP with\n"
      "                       others (default: tcp, since UCX does not check what arrives: use it\n"
      "                       where everybody who can connect is trusted)\n"
      "  --ucx-library FILE   libucp.so.0 to use for that (default: the system's)\n"
      "  --tokens FILE        serve only workers that have one of its tokens, and each job only "
      "the\n"
      "                       workers with the same; a line: a name, blanks, a token of 16\n"
      "                       characters or more. The file is read again when it has changed\n"
      "  --help               print this and exit\n"
      "\n"
      "Without --tokens whoever reaches the address can use it. Blocks are not encrypted.\n"
      "SIGTERM and SIGINT end it.\n");
}

AggregatorCommand parse_command_line(std::span<char const* const> arguments) {
  AggregatorCommand command;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string_view const argument = arguments[i];
    if (argument == "--help") {
      command.help = true;
      return command;
    }
    std::size_t const equals = argument.find('=');
    std::string_view const name = argument.substr(0, equals);
    auto const value = [&]() -> std::string_view {
      if (equals != std::string_view::npos) return argument.substr(equals + 1);
      require(i + 1 < arguments.size(), name, " needs a value; see --help");
      return arguments[++i];
    };
    AggregatorOptions& options = command.options;
    if (name == "--listen") {
      options.listen = value();
      HostPort::parse(options.listen);
    } else if (name == "--memory") {
      options.memory = parse_bytes(value());
    } else if (name == "--limit") {
      options.limit = std::chrono::duration_cast<Duration>(
          std::chrono::duration<double>(parse_number(name, value(), .001, 86400.)));
    } else if (name == "--connections") {
      options.connections = parse_number<std::size_t>(name, value(), 1, 1 << 20);
    } else if (name == "--tokens") {
      command.tokens = value();
    } else if (name == "--ucx-library") {
      options.messages.ucx.library = value();
    } else if (name == "--transport") {
      options.messages.transport = message_transport_named(value(), "--transport");
    } else {
      throw InvalidArgument(concat("unknown argument \"", argument, "\"; see --help"));
    }
  }
  require(!command.options.listen.empty(),
          "--listen is missing: say where workers connect, for example --listen 10.0.0.5:7000");
  return command;
}

}  // namespace sparsecomm
