// Words of the engine on their way to Python's logging.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "engine/stall.h"
#include "interpreter.h"
#include "python_duration.h"

namespace sparsecomm {

// `log` takes the interpreter itself.
inline std::function<void(std::string const&)> log_of_python(
    std::function<void(std::string const&)> log) {
  return [kept = drop_with_interpreter(std::move(log))](std::string const& text) {
    with_interpreter([&] { (*kept)(text); });
  };
}

// No limit: nobody is told.
inline StallOptions make_stall_options(std::optional<PythonDuration> limit,
                                       std::function<void(std::string const&)> log) {
  StallOptions options;
  if (!limit) return options;
  options.limit = limit->value;
  options.log = log_of_python(std::move(log));
  return options;
}

}  // namespace sparsecomm
