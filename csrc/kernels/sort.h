// Stable radix sort of slot << 32 | position pairs by the lowest `slot_bits` bits of the slot.
#pragma once

#include <cstdint>

namespace shoal {

// Returns `pairs` or `spare`, whichever holds the result; both hold n.
// REQUIRES: the pairs' slots agree in all higher bits, and equal slots stand in order of position.
const uint64_t* sort_by_slot(uint64_t* pairs, uint64_t* spare, int64_t n, int slot_bits);

}  // namespace shoal
