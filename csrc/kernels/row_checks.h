// What files promise of their rows, looked at before anything is made of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace shoal {

// A key that comes more than once among the pieces; none where each comes once. Its time is linear in the number of keys,
// whatever they are: no one who does not know this process's seed can choose keys that are slow. Takes 8 bytes a key
// meanwhile, unless they come in ascending order. Throws std::bad_alloc.
std::optional<int64_t> repeated_key(std::span<const std::span<const int64_t>> pieces);

// The position of the first key whose bucket is outside of [first, last], or lower than that of the key before; -1 where
// there is none. REQUIRES: 0 < buckets.
int64_t first_out_of_order(std::span<const int64_t> keys, uint64_t buckets, uint64_t first, uint64_t last);

// Whether none of these 16-bit floats is NaN or infinity. `exponent`: the bits of its exponent, all of which these have.
bool all_finite16(std::span<const uint16_t> floats, uint16_t exponent);

}  // namespace shoal
