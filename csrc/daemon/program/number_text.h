// A number in as many digits as tell it from any other.
#pragma once

#include <array>
#include <charconv>
#include <string>

namespace sparsecomm {

inline std::string number_text(double number) {
  std::array<char, 32> text;  // 24 are the most
  auto const end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

}  // namespace sparsecomm
