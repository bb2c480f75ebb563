// The tokens that let workers use an aggregator, in a file that may change while it runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/log_entry.h"
#include "ina/greeting.h"

namespace sparsecomm {

// An HMAC with SHA-256 (RFC 2104).
Proof hmac_sha256(std::string_view key, std::span<const std::byte> message);

// One token a line: its owner's name, blanks, and the token, of 16 printable characters or more. A
// line that is empty or begins with # says nothing.
class TokenFile {
 public:
  static constexpr std::size_t least_token = 16, most_name = 64, most_bytes = std::size_t{1} << 20;

  // Throws InvalidArgument that names the file, the line and what is wrong with it.
  TokenFile(std::string path, Log log);

  // The name of the owner of the token that the proof was made with; empty: none has it. Takes as
  // long whichever it is. Reads the file again if it has changed; what cannot be used is logged,
  // and the tokens stay as they were. O(tokens).
  std::string owner_of(std::span<const std::byte> message, Proof const& proof);
  std::size_t size() const { return tokens_.size(); }

 private:
  struct Token {
    std::string owner, secret;
  };
  // By which a file that was changed, or replaced, is told from what it was.
  using Stamp = std::array<std::int64_t, 6>;

  static Stamp stamp_of(std::string const& path);
  static std::vector<Token> read(std::string const& path);
  void refresh();

  std::string const path_;
  Log const log_;
  Stamp stamp_;
  std::vector<Token> tokens_;
  std::string logged_;  // last, so that who connects often does not fill the log
};

}  // namespace sparsecomm
