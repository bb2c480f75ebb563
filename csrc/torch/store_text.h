// Text in a torch store, which holds bytes.
#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace sparsecomm {

inline std::vector<std::uint8_t> as_store_bytes(std::string const& text) {
  return {text.begin(), text.end()};
}

inline std::string as_text(std::vector<std::uint8_t> const& bytes) {
  return {bytes.begin(), bytes.end()};
}

inline void set_text(c10d::Store& store, std::string const& key, std::string const& text) {
  store.set(key, as_store_bytes(text));
}

// Blocks until the key exists.
inline std::string get_text(c10d::Store& store, std::string const& key) {
  return as_text(store.get(key));
}

// Replaces `expected`, which is empty for a key that does not exist; returns what it holds then.
inline std::string replace_text(c10d::Store& store, std::string const& key,
                                std::string const& expected, std::string const& text) {
  return as_text(store.compareSet(key, as_store_bytes(expected), as_store_bytes(text)));
}

}  // namespace sparsecomm
