// torch's radix sort of pairs. torch.sort pairs with numbers of 64 bits and sorts by all bits; half of either is enough
// here. It is looked for at run time, by the name that the compiler gave it, which says what arguments it takes.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace shoal {

// Sorts n keys by the bits [begin_bit, end_bit) and their numbers with them, stably, on torch's current stream.
using SortPairs = void (*)(const int32_t* keys, int32_t* sorted_keys, const void* numbers, void* sorted_numbers,
                           int64_t n, bool descending, int64_t begin_bit, int64_t end_bit);

// Null where torch is not loaded, has no CUDA, or has no such function.
SortPairs find_sort_pairs();

// Keys ascending by their low `bits`, each with its number, of 32 bits too. What torch throws becomes a status.
Status sort_pairs(SortPairs sort, const int32_t* keys, int32_t* sorted_keys, const int32_t* numbers,
                  int32_t* sorted_numbers, int64_t n, int64_t bits);

}  // namespace shoal
