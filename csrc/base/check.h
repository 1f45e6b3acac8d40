// What the C++ tests need: a check that says where and with which values it failed, and the numbers to test with.
#pragma once

#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>

// CHECK(index.find(key) == slot, key, slot) prints the place, the condition and the values, and ends the program.
#define CHECK(condition, ...)                                                                         \
  do {                                                                                                \
    if (!(condition)) [[unlikely]]                                                                    \
      ::shoal::check_failed(__FILE__, __LINE__, #condition, #__VA_ARGS__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHOAL_SANITIZED 1
#else
#define SHOAL_SANITIZED 0
#endif

namespace shoal {

template <typename... Values>
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const char* names,
                               const Values&... values) {
  std::cerr.precision(17);
  std::cerr << file << ":" << line << ": failed: " << condition;
  if constexpr (sizeof...(values) > 0) {
    std::cerr << " where " << names << " =";
    ((std::cerr << " " << values), ...);
  }
  std::cerr << std::endl;
  // Not exit(): other threads may still run, and static destructors that run at the same time would hide what failed.
  std::_Exit(1);
}

// The same numbers on every machine (splitmix64), so that a failure can be repeated.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  // In [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  // In [-1, 1).
  float unit() { return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

 private:
  uint64_t state_;
};

// The inverse of an odd number modulo 2^64, by Newton: each round doubles the bits that are right.
inline uint64_t inverse(uint64_t odd) {
  uint64_t x = odd;
  for (int round = 0; round < 6; ++round) x *= 2 - odd * x;
  return x;
}

// unmix64(mix64(x)) == x: makes keys with a hash of the test's choice.
inline uint64_t unmix64(uint64_t x) {
  static const uint64_t second = inverse(0xc4ceb9fe1a85ec53ULL), first = inverse(0xff51afd7ed558ccdULL);
  x = (x ^ (x >> 33)) * second;
  x = (x ^ (x >> 33)) * first;
  return x ^ (x >> 33);
}

// Runs `body` while the process can map only about `extra` bytes more. Not under a sanitizer, which maps for itself.
template <typename Body>
void with_memory_limit(size_t extra, const Body& body) {
  rlimit before;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  size_t mapped_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages;
  rlimit limited = before;
  limited.rlim_cur = mapped_pages * 4096 + extra;
  CHECK(setrlimit(RLIMIT_AS, &limited) == 0);
  body();
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
}

}  // namespace shoal
