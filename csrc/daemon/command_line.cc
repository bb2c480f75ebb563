#include "daemon/command_line.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <optional>
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

Duration parse_seconds(std::string_view name, std::string_view text, double least, double most) {
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(parse_number(name, text, least, most)));
}

std::string parse_address(std::string_view name, std::string_view text) {
  try {
    HostPort::parse(text);
  } catch (InvalidArgument const& error) {
    throw InvalidArgument(concat(name, ": ", error.what()));
  }
  return std::string(text);
}

constexpr double day = 86400;

template <class T>
struct Named {
  std::string_view name;
  T value;
};
constexpr Named<LogFormat> log_formats[] = {{"text", LogFormat::text}, {"json", LogFormat::json}};
constexpr Named<LogLevel> log_levels[] = {{"debug", LogLevel::debug},
                                          {"info", LogLevel::info},
                                          {"warning", LogLevel::warning},
                                          {"error", LogLevel::error}};

template <class T, std::size_t Count>
T parse_name(std::string_view name, std::string_view text, Named<T> const (&table)[Count]) {
  std::string names;
  for (auto const& entry : table) {
    if (entry.name == text) return entry.value;
    names += concat(names.empty() ? "" : ", ", entry.name);
  }
  throw InvalidArgument(concat(name, " is \"", text, "\", must be one of: ", names));
}

// One owner of name, meaning and help, for command line and file.
struct Setting {
  std::string_view name;   // --name on the command line
  std::string_view value;  // as the help calls it
  std::string_view help;   // lines
  void (*set)(AggregatorCommand& command, std::string_view name, std::string_view text);
};

constexpr Setting settings[] = {
    {"listen", "HOST:PORT",
     "where workers connect; no host: all IPv4 addresses of this machine,\n"
     "[::]: those of IPv6 too; port 0: a free one, which the first line of the\n"
     "output names",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.listen = parse_address(name, text);
     }},
    {"memory", "SIZE",
     "what operations may take together, in bytes, KiB, MiB or GiB; a job\n"
     "takes up to 1 MiB beside that, and 600 bytes for each worker\n"
     "(default: 256MiB)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.memory = parse_bytes(name, text);
     }},
    {"job-memory", "SIZE", "what one job may take of it (default: all)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.job_memory = parse_bytes(name, text);
     }},
    {"limit", "SECONDS",
     "after which an operation fails that a worker does not go on with;\n"
     "counted anew with every round (default: 60)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.limit = parse_seconds(name, text, .001, day);
     }},
    {"idle", "SECONDS",
     "after which a job that sends nothing is ended; its ranks go on without\n"
     "this aggregator (default: 3600)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.idle = parse_seconds(name, text, .1, 365 * day);
     }},
    {"connections", "COUNT", "at once; others wait (default: 1024)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.connections = parse_number<std::size_t>(name, text, 1, 1 << 20);
     }},
    {"transport", "WAY",
     "of messages: tcp; ucx (RDMA, shared memory or its own TCP), or auto:\n"
     "RDMA or shared memory over UCX with the workers that can, TCP with\n"
     "others (default: tcp, since UCX does not check what arrives: use it\n"
     "where everybody who can connect is trusted)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.options.messages.transport = message_transport_named(text, name);
     }},
    {"ucx-library", "FILE", "libucp.so.0 to use for that (default: the system's)",
     [](AggregatorCommand& command, std::string_view, std::string_view text) {
       command.options.messages.ucx.library = text;
     }},
    {"tokens", "FILE",
     "serve only workers that have one of its tokens, and each job only the\n"
     "workers with the same; a line: a name, blanks, a token of 16\n"
     "characters or more. The file is read again when it has changed",
     [](AggregatorCommand& command, std::string_view, std::string_view text) {
       command.tokens = text;
     }},
    {"drain", "SECONDS",
     "that jobs may go on for after SIGTERM or SIGINT, when no more are\n"
     "taken; another one of these signals ends it at once (default: 30)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.drain = parse_drain(name, text);
     }},
    {"http", "HOST:PORT",
     "where GET /metrics (for Prometheus), /healthz and /readyz are answered;\n"
     "port 0: a free one, which the second line of the output names\n"
     "(default: nowhere)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.http = parse_address(name, text);
     }},
    {"control", "PATH",
     "of a Unix socket for the command sparsecomm aggregator ctl, for the\n"
     "user that runs this alone (default: none)",
     [](AggregatorCommand& command, std::string_view, std::string_view text) {
       command.control = text;
     }},
    {"log-format", "FORMAT", "text, or json: an object a line (default: text)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.log.format = parse_name(name, text, log_formats);
     }},
    {"log-level", "LEVEL", "debug, info, warning or error (default: info)",
     [](AggregatorCommand& command, std::string_view name, std::string_view text) {
       command.log.least = parse_name(name, text, log_levels);
     }},
    {"log-file", "FILE", "to append the log to (default: standard error)",
     [](AggregatorCommand& command, std::string_view, std::string_view text) {
       command.log.file = text;
     }},
};

Setting const* find_setting(std::string_view name) {
  auto const found = std::ranges::find(settings, name, &Setting::name);
  return found == std::end(settings) ? nullptr : found;
}

std::string help_line(std::string_view argument, std::string_view help) {
  constexpr std::size_t column = 23;
  std::string text = concat("  ", argument);
  text.resize(std::max(text.size() + 1, column), ' ');
  for (char const c : help) {
    text += c;
    if (c == '\n') text.append(column, ' ');
  }
  return text + '\n';
}

void set_from_file(AggregatorCommand& command, WrittenSetting const& written) {
  Setting const* const setting = find_setting(written.name);
  require(setting != nullptr, written.where, ": unknown setting \"", written.name,
          "\"; --help names those that there are");
  try {
    setting->set(command, written.name, written.value);
  } catch (InvalidArgument const& error) {
    throw InvalidArgument(concat(written.where, ": ", error.what()));
  }
}

}  // namespace

Duration parse_drain(std::string_view name, std::string_view text) {
  return parse_seconds(name, text, 0, 365 * day);
}

std::size_t parse_bytes(std::string_view name, std::string_view text) {
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
          name, " is \"", text, "\", must be a number of bytes, or of KiB, MiB or GiB: 256MiB");
  return value << shift;
}

std::string aggregator_usage() {
  std::string text =
      "usage: sparsecomm-aggregator --listen HOST:PORT [--config FILE] [ARGUMENT ...]\n"
      "\n"
      "Sums blocks of tensors for the workers of training jobs (in-network aggregation).\n"
      "\n";
  for (Setting const& setting : settings) {
    text += help_line(concat("--", setting.name, " ", setting.value), setting.help);
  }
  text += help_line("--config FILE",
                    "settings in TOML, by the names above without dashes in front:\n"
                    "memory = \"256MiB\". The command line goes before the file");
  text += help_line("--check", "look at the settings and the files they name, and exit");
  text += help_line("--help", "print this and exit");
  return text +
         "\n"
         "Without --tokens whoever reaches the address can use it. Blocks are not encrypted.\n";
}

AggregatorCommand parse_command_line(std::span<char const* const> arguments,
                                     SettingsReader const& read_file) {
  AggregatorCommand command;
  std::vector<std::pair<std::string_view, std::string_view>> given;  // with dashes, in order
  std::optional<std::string> file;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string_view const argument = arguments[i];
    if (argument == "--help") {
      command.help = true;
      return command;
    }
    if (argument == "--check") {
      command.check = true;
      continue;
    }
    std::size_t const equals = argument.find('=');
    std::string_view const name = argument.substr(0, equals);
    bool const known =
        name == "--config" || (name.starts_with("--") && find_setting(name.substr(2)));
    require(known, "unknown argument \"", argument, "\"; see --help");
    require(equals != std::string_view::npos || i + 1 < arguments.size(), name,
            " needs a value; see --help");
    std::string_view const value =
        equals != std::string_view::npos ? argument.substr(equals + 1) : arguments[++i];
    if (name == "--config") {
      file = value;
    } else {
      given.emplace_back(name, value);
    }
  }
  if (file) {
    for (WrittenSetting const& written : read_file(*file)) set_from_file(command, written);
  }
  for (auto const& [name, value] : given) {
    find_setting(name.substr(2))->set(command, name, value);
  }
  require(!command.options.listen.empty(),
          "--listen is missing: say where workers connect, for example --listen 10.0.0.5:7000");
  require(command.options.job_memory <= command.options.memory, "--job-memory is ",
          command.options.job_memory, ", must be at most --memory, ", command.options.memory);
  return command;
}

}  // namespace sparsecomm
