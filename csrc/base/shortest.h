// How a number is written for ranks to compare and for people to read.
#pragma once

#include <array>
#include <charconv>
#include <ostream>

namespace sparsecomm {

// Prints the fewest digits that read back as the same number.
struct Shortest {
  double value;
  friend std::ostream& operator<<(std::ostream& out, Shortest number) {
    std::array<char, 32> digits{};
    char* const end = std::to_chars(digits.begin(), digits.end(), number.value).ptr;
    return out.write(digits.data(), end - digits.data());
  }
};

}  // namespace sparsecomm
