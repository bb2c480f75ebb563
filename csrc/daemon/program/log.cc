#include "daemon/program/log.h"

#include <spdlog/async.h>
#include <spdlog/async_logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"

namespace sparsecomm {
namespace {

constexpr spdlog::level::level_enum levels[] = {spdlog::level::debug, spdlog::level::info,
                                                spdlog::level::warn, spdlog::level::err};

spdlog::level::level_enum level_of(LogLevel level) {
  return levels[static_cast<std::size_t>(level)];
}

spdlog::sink_ptr make_sink(std::string const& file) {
  if (file.empty()) return std::make_shared<spdlog::sinks::stderr_sink_st>();
  try {
    return std::make_shared<spdlog::sinks::basic_file_sink_st>(file);
  } catch (spdlog::spdlog_ex const& error) {
    throw InvalidArgument(concat("--log-file ", file, ": ", error.what()));
  }
}

// Times in UTC, to the millisecond.
char const* pattern_of(LogFormat format) {
  return format == LogFormat::json ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                                   : "%Y-%m-%dT%H:%M:%S.%eZ sparsecomm-aggregator %l: %v";
}

// Its members, without the braces around them.
std::string members_of(LogEntry const& entry) {
  nlohmann::ordered_json object = {{"message", entry.text}};
  for (auto const& [name, value] : entry.fields) object[std::string(name)] = value;
  // Bytes that are no UTF-8, of a file's name, are replaced.
  std::string const text =
      object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  return text.substr(1, text.size() - 2);
}

// What others send may be part of it, and is not to steer a terminal.
std::string printable(std::string text) {
  std::ranges::replace_if(text, [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return text;
}

}  // namespace

ProgramLog::ProgramLog(LogSettings const& settings)
    : format_(settings.format),
      writer_(std::make_shared<spdlog::details::thread_pool>(most_waiting, 1)),
      logger_(std::make_shared<spdlog::async_logger>(
          "", make_sink(settings.file), writer_, spdlog::async_overflow_policy::overrun_oldest)) {
  logger_->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      pattern_of(format_), spdlog::pattern_time_type::utc));
  logger_->set_level(level_of(settings.least));
  logger_->flush_on(spdlog::level::trace);
  logger_->set_error_handler([](std::string const&) {});
}

ProgramLog::~ProgramLog() = default;

void ProgramLog::write(LogEntry const& entry) {
  if (!logger_->should_log(level_of(entry.level))) return;
  std::lock_guard const lock(mutex_);
  TimePoint const now = steady_clock().now();
  if (now - second_ >= std::chrono::seconds(1)) {
    second_ = now;
    lines_ = 0;
    if (std::uint64_t const count = std::exchange(left_out_, 0); count > 0) {
      write_at_once(
          {.level = LogLevel::warning,
           .text = concat(count, " lines were left out, over ", most_lines, " in a second")});
    }
  }
  if (++lines_ > most_lines && entry.level < LogLevel::error) {
    ++left_out_;
  } else {
    write_at_once(entry);
  }
}

void ProgramLog::write_at_once(LogEntry const& entry) {
  logger_->log(level_of(entry.level), "{}",
               format_ == LogFormat::json ? members_of(entry) : printable(entry.text));
}

}  // namespace sparsecomm
