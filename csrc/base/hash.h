// The hashes that files, ranks and GPUs must agree on; docs/formats.md specifies them with test vectors.
#pragma once

#include <cstdint>
#include <string_view>

namespace shoal {

// A bijection of 64-bit words (the finaliser of MurmurHash3).
static inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// FNV-1a over the bytes of a table's name in UTF-8.
static inline uint64_t name_hash(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (unsigned char byte : name) hash = (hash ^ byte) * 0x100000001b3ULL;
  return hash;
}

// The unit of placement a key belongs to.
static inline uint64_t bucket_of(int64_t key, uint64_t buckets) { return mix64(static_cast<uint64_t>(key)) % buckets; }

// Philox keys of a table: one stream for births, one for stochastic rounding.
static inline uint64_t birth_stream(uint64_t seed, uint64_t name) { return mix64(mix64(name) + seed); }
static inline uint64_t rounding_stream(uint64_t seed, uint64_t name) {
  return mix64(birth_stream(seed, name) + 0x9e3779b97f4a7c15ULL);
}

}  // namespace shoal
