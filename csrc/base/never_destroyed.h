// Statics that are not trivial.
#pragma once

#include <type_traits>
#include <utility>

namespace sparsecomm {

// A copy that is never destroyed: a program may exit while a progress thread runs, and exit()
// destroys what is static beneath it.
template <class T>
std::remove_cvref_t<T> const* never_destroyed(T&& value) {
  return new std::remove_cvref_t<T>(std::forward<T>(value));
}

}  // namespace sparsecomm
