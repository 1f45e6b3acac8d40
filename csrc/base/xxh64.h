// XXH64 with seed 0: the hash that makes an id of a string. docs/formats.md specifies it with test vectors.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace shoal {

namespace xxh64_detail {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87ULL;
constexpr uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fULL;
constexpr uint64_t kPrime3 = 0x165667b19e3779f9ULL;
constexpr uint64_t kPrime4 = 0x85ebca77c2b2ae63ULL;
constexpr uint64_t kPrime5 = 0x27d4eb2f165667c5ULL;

// Words are little-endian whatever the machine is, and at any address.
static inline uint64_t word64(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}
static inline uint64_t word32(const unsigned char* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}
static inline uint64_t round(uint64_t sum, uint64_t word) { return std::rotl(sum + word * kPrime2, 31) * kPrime1; }

}  // namespace xxh64_detail

static inline uint64_t xxh64(const void* data, size_t bytes) {
  using namespace xxh64_detail;
  const auto* at = static_cast<const unsigned char*>(data);
  size_t left = bytes;
  uint64_t hash = kPrime5;
  if (left >= 32) {
    uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
    for (; left >= 32; at += 32, left -= 32) {
      a = round(a, word64(at));
      b = round(b, word64(at + 8));
      c = round(c, word64(at + 16));
      d = round(d, word64(at + 24));
    }
    hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (uint64_t sum : {a, b, c, d}) hash = (hash ^ round(0, sum)) * kPrime1 + kPrime4;
  }
  hash += bytes;
  for (; left >= 8; at += 8, left -= 8) hash = std::rotl(hash ^ round(0, word64(at)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = std::rotl(hash ^ (word32(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left; ++at, --left) hash = std::rotl(hash ^ (*at * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace shoal
