// The gradients of a table's rows, added up without a sort: for batches whose keys repeat.
//
// Positions are walked in order. Each row that they name gets a number and a sum when it comes first, and a row that comes
// again adds to its sum, which is in a cache by then. A sum has the bits that adding a sorted row's gradients has.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "kernels/update.h"

namespace shoal {

// Room for up to `most` rows.
struct SumRoom {
  float* sums;       // [most, dim]
  uint64_t* rows;    // [most]: slot << 32 | number of the sum
  uint64_t* spare;   // [most], to sort them
  uint32_t* first;   // [most]: the first position that named the row, by number
  uint64_t* places;  // [sum_places(most)]: where a slot's number is found
};

// Spreads slots over the upper bits: 2^32 / the golden ratio.
SHOAL_INLINE uint32_t spread(uint32_t slot) { return slot * 0x9e3779b1u; }

// Places a row: most rows are found in the first place that is looked at.
static constexpr int64_t kSumPlaces = 6;

// A power of two, as many as that many rows may come to need.
inline int64_t sum_places(int64_t rows) {
  int64_t places = 1024;
  while (places < 2 * kSumPlaces * rows) places *= 2;
  return places;
}

// Which of a table's positions: those whose slot >> shift is `number`.
struct SlotRange {
  int shift;
  uint32_t number;
};

struct SumKernel {
  // Returns the number of rows. REQUIRES: the table's gradients are reduced by their sum.
  int64_t (*run)(const UpdatePart& part, const Bags& bags, SlotRange range, const SumRoom& room);
};
SHOAL_DISPATCH(SumKernel, sum_kernel)

// Whether adding up without a sort is faster: whether in a sample enough positions of a table's features name a row
// that another position names too.
bool keys_repeat(const GradientRow* features, int64_t feature_count, const Bags& bags);

}  // namespace shoal
