// What files promise of their rows, looked at before anything is made of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace shoal {

// Returns a key that is more than once among the pieces, or none. The time is linear in the number of keys, whatever
// they are: without this process's seed, keys that are slow cannot be chosen. Takes 8 bytes a key while it runs, unless
// the keys are in ascending order. Throws std::bad_alloc.
std::optional<int64_t> repeated_key(std::span<const std::span<const int64_t>> pieces);

// Keys in the order of their buckets.
struct BucketedKeys {
  int64_t misplaced = -1;           // the first one that is not; nothing else is known then
  std::optional<int64_t> repeated;  // one that comes more than once
  int64_t head = 0;                 // how many have the bucket of the first
  int64_t tail = 0;                 // where those begin that have the bucket of the last
};

// Looks whether keys stand in the order of their buckets, which are in [first, last], and come once; in linear time, as
// above. Throws std::bad_alloc. REQUIRES: 0 < buckets.
BucketedKeys look_by_bucket(std::span<const int64_t> keys, uint64_t buckets, uint64_t first, uint64_t last);

// Whether none of these 16-bit floats is NaN or infinity. `exponent`: the bits of its exponent, all of which these have.
bool all_finite16(std::span<const uint16_t> floats, uint16_t exponent);

}  // namespace shoal
