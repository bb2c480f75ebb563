#include "daemon/program/settings_file.h"

#include <fstream>
#include <ios>
#include <iterator>
#include <optional>
#include <string_view>

#define TOML_HEADER_ONLY 1
#define TOML_SHARED_LIB 0
#include <toml++/toml.h>

#include "base/error.h"
#include "daemon/program/number_text.h"
#include "ina/socket.h"

namespace sparsecomm {
namespace {

std::string where(std::string const& file, toml::source_region const& source) {
  return concat("--config ", file, ":", source.begin.line);
}

std::string read_all(std::string const& file) {
  std::ifstream stream(file);
  require(stream.good(), "--config ", file, ": ", system_text());
  try {
    return {std::istreambuf_iterator<char>(stream), {}};
  } catch (std::ios_base::failure const& error) {  // as for a folder
    throw InvalidArgument(concat("--config ", file, ": ", error.what()));
  }
}

std::string text_of(toml::node const& value, std::string const& at, std::string_view key) {
  if (auto const text = value.value_exact<std::string>()) return *text;
  if (auto const whole = value.value_exact<std::int64_t>()) return concat(*whole);
  if (auto const number = value.value_exact<double>()) return number_text(*number);
  throw InvalidArgument(concat(at, ": ", key, " must be text or a number"));
}

}  // namespace

std::vector<WrittenSetting> read_settings(std::string const& file) {
  toml::table table;
  try {
    table = toml::parse(read_all(file), file);
  } catch (toml::parse_error const& error) {
    throw InvalidArgument(concat(where(file, error.source()), ": ", error.description()));
  }
  std::vector<WrittenSetting> settings;
  for (auto const& [key, value] : table) {
    std::string const at = where(file, value.source());
    settings.push_back({std::string(key.str()), text_of(value, at, key.str()), at});
  }
  return settings;
}

}  // namespace sparsecomm
