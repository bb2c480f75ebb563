// Counts what a thread allocates while it asks for it. To be included by one file of a program,
// whose operator new this replaces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace sparsecomm::test {

inline thread_local bool counting = false;
inline thread_local std::size_t allocations = 0;

}  // namespace sparsecomm::test

// Not inlined: GCC would take free() for the wrong partner of new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  sparsecomm::test::allocations += sparsecomm::test::counting;
  if (void* const memory = std::malloc(std::max<std::size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
