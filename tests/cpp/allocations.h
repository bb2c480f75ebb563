// Counts what a thread allocates while it asks for it, and lets that fail. To be included by one
// file of a program, whose operator new this replaces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>

namespace sparsecomm::test {

inline thread_local bool counting = false;
inline thread_local std::size_t allocations = 0;
inline thread_local std::size_t allocated_bytes = 0;
// Of those counted, the first that fail, and the first after these that succeed again.
inline thread_local std::size_t first_refused = std::numeric_limits<std::size_t>::max();
inline thread_local std::size_t last_refused = std::numeric_limits<std::size_t>::max();

// While it lives, this thread does not count.
struct Uncounted {
  bool const before = std::exchange(counting, false);
  ~Uncounted() { counting = before; }
};

}  // namespace sparsecomm::test

// Not inlined: GCC would take free() for the wrong partner of new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  using namespace sparsecomm::test;
  if (counting) {
    std::size_t const number = allocations++;
    allocated_bytes += size;
    if (number >= first_refused && number < last_refused) throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(std::max<std::size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
