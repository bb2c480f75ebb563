// The magnitudes of elements of a gradient.
#pragma once

#include "base/dtype.h"
#include "base/magnitude.h"

namespace sparsecomm {

template <class T>
accumulate_t<T> widen(T value) {
  return static_cast<accumulate_t<T>>(value);
}

}  // namespace sparsecomm
