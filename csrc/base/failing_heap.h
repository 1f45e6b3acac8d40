// For tests of what happens where the heap ends: replaces operator new by one that refuses when told to. Include it in
// one file of a program.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

namespace shoal {

inline constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();
inline std::atomic<int64_t> g_allocations_left{kEndless};

// Runs `body` with a heap that refuses all but the first `allocations`; false if it threw std::bad_alloc.
template <typename Body>
bool with_heap_for(int64_t allocations, const Body& body) {
  bool done = true;
  g_allocations_left.store(allocations);
  try {
    body();
  } catch (const std::bad_alloc&) {
    done = false;
  }
  g_allocations_left.store(kEndless);
  return done;
}

}  // namespace shoal

// Not inlined: GCC would see malloc and free without their pair and warn.
// Also where nothing is thrown, as in std::stable_sort: a sanitizer wants its pair to be of one kind.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return shoal::g_allocations_left.fetch_sub(1) > 0 ? std::malloc(bytes ? bytes : 1) : nullptr;
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
