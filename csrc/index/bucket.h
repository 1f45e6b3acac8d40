// The index's memory: buckets of one cache line, five keys each, so that a find that hits its home bucket costs one miss.
//
// A key's home is mulhi(hash, n): it grows with the hash, so the array is ordered by hash but for overflow, and it can be
// stretched in place. While that happens, hashes below `frontier` live at scale `low` and the rest at scale `high`.
// A full bucket passes a key on to the next one and counts it in `over`; a find goes on while `over` is not zero, and an
// erase takes its counts back, so there are no tombstones and no reserved key.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "base/hash.h"

namespace shoal {

static constexpr int kBucketKeys = 5;

struct alignas(64) Bucket {
  int64_t keys[kBucketKeys];
  uint32_t slots[kBucketKeys];
  uint8_t used;  // one bit a key
  uint8_t spare;
  uint16_t over;  // keys that passed through; sticks at its maximum
};
static_assert(sizeof(Bucket) == 64);

static constexpr int kChunkBits = 15;  // 2 MiB of buckets
static constexpr uint64_t kChunkBuckets = uint64_t{1} << kChunkBits;

struct IndexView {
  Bucket* const* chunks = nullptr;
  uint64_t low = 0;
  uint64_t high = 0;
  uint64_t frontier = 0;

  SHOAL_INLINE Bucket* at(uint64_t bucket) const {
    return chunks[bucket >> kChunkBits] + (bucket & (kChunkBuckets - 1));
  }
};

// The lowest bit is dropped so that every hash is below the largest frontier.
static inline uint64_t index_hash(int64_t key) { return mix64(static_cast<uint64_t>(key)) & ~uint64_t{1}; }
static inline uint64_t scaled(uint64_t hash, uint64_t buckets) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * buckets) >> 64);
}
static inline uint64_t home_of(const IndexView& view, uint64_t hash) {
  return scaled(hash, hash < view.frontier ? view.low : view.high);
}

}  // namespace shoal
