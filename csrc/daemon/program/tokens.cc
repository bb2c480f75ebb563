#include "daemon/program/tokens.h"

#include <mbedtls/md.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "ina/socket.h"

namespace sparsecomm {
namespace {

bool is_printable(char c) { return c > 0x20 && c < 0x7f; }

// In a time that does not depend on where they differ.
bool equal(Proof const& one, Proof const& other) {
  std::byte volatile differing{};
  for (std::size_t i = 0; i < one.size(); ++i) differing = differing | (one[i] ^ other[i]);
  return differing == std::byte{};
}

}  // namespace

Proof hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  Proof proof;
  auto const bytes = [](auto const* data) { return reinterpret_cast<unsigned char const*>(data); };
  int const failed = mbedtls_md_hmac(
      mbedtls_md_info_from_type(MBEDTLS_MD_SHA256), bytes(key.data()), key.size(),
      bytes(message.data()), message.size(), reinterpret_cast<unsigned char*>(proof.data()));
  require<Error>(failed == 0, "mbedtls_md_hmac: error ", failed);
  return proof;
}

TokenFile::TokenFile(std::string path, Log log)
    : path_(std::move(path)),
      log_(std::move(log)),
      stamp_(stamp_of(path_)),  // first: what is changed meanwhile is read again
      tokens_(read(path_)) {}

std::string TokenFile::owner_of(std::span<const std::byte> message, Proof const& proof) {
  refresh();
  std::string owner;
  for (Token const& token : tokens_) {
    if (equal(hmac_sha256(token.secret, message), proof)) owner = token.owner;
  }
  return owner;
}

void TokenFile::refresh() {
  std::string found;
  LogLevel level = LogLevel::info;
  try {
    Stamp const stamp = stamp_of(path_);
    if (stamp == stamp_) return;
    stamp_ = stamp;
    tokens_ = read(path_);
    found = concat("--tokens ", path_, " has changed: ", tokens_.size(), " tokens");
  } catch (Error const& error) {
    found = concat(error.what(), "; the tokens stay as they were");
    level = LogLevel::error;
  }
  if (std::exchange(logged_, found) != found) log_({.level = level, .text = found});
}

TokenFile::Stamp TokenFile::stamp_of(std::string const& path) {
  struct stat found{};
  bool const there = ::stat(path.c_str(), &found) == 0;  // before errno is looked at
  require(there, "--tokens ", path, ": ", system_text());
  return {static_cast<std::int64_t>(found.st_ino),
          found.st_size,
          found.st_mtim.tv_sec,
          found.st_mtim.tv_nsec,
          found.st_ctim.tv_sec,
          found.st_ctim.tv_nsec};
}

std::vector<TokenFile::Token> TokenFile::read(std::string const& path) {
  std::ifstream file(path);
  require(file.good(), "--tokens ", path, ": ", system_text());
  std::vector<Token> tokens;
  std::size_t bytes = 0;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    bytes += line.size() + 1;
    auto const check = [&](bool holds, auto const&... text) {
      require(holds, "--tokens ", path, ", line ", number, ": ", text...);
    };
    ++number;
    check(bytes <= most_bytes, "the file is longer than ", most_bytes, " bytes");
    if (line.empty() || line.front() == '#') continue;
    auto const end = std::ranges::find_if_not(line, is_printable);
    auto const begin = std::find_if(end, line.end(), is_printable);
    auto const behind = std::find_if_not(begin, line.end(), is_printable);
    std::string const owner(line.begin(), end);
    check(std::all_of(end, begin, [](char c) { return c == ' ' || c == '\t'; }) &&
              behind == line.end() && begin != line.end() && !owner.empty(),
          "must be a name, blanks and a token");
    check(owner.size() <= most_name, "the name has ", owner.size(),
          " characters, must have at most ", most_name);
    std::string secret(begin, behind);
    check(secret.size() >= least_token, "the token of ", owner, " has ", secret.size(),
          " characters, must have ", least_token, " or more: openssl rand -hex 32 makes one");
    check(std::ranges::find(tokens, owner, &Token::owner) == tokens.end(), "another token of ",
          owner, "; each needs a name of its own");
    check(std::ranges::find(tokens, secret, &Token::secret) == tokens.end(), "the token of ", owner,
          " is another's too");
    tokens.push_back({owner, std::move(secret)});
  }
  require(!file.bad(), "--tokens ", path, ": it cannot be read");
  require(!tokens.empty(), "--tokens ", path, ": there is no token in it");
  return tokens;
}

}  // namespace sparsecomm
