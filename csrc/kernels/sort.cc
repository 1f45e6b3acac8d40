#include "kernels/sort.h"

#include <algorithm>
#include <utility>

namespace shoal {

// Two passes of up to 11 bits sort the slots of a table of two million rows; 2048 counters stay in the first-level cache.
static constexpr int kMaxDigit = 11;
static constexpr int64_t kInsertionBelow = 24;

const uint64_t* sort_by_slot(uint64_t* pairs, uint64_t* spare, int64_t n, int slot_bits) {
  if (n < kInsertionBelow) {
    for (int64_t i = 1; i < n; ++i) {
      uint64_t pair = pairs[i];
      int64_t j = i;
      for (; j > 0 && pairs[j - 1] >> 32 > pair >> 32; --j) pairs[j] = pairs[j - 1];
      pairs[j] = pair;
    }
    return pairs;
  }
  int passes = (slot_bits + kMaxDigit - 1) / kMaxDigit;
  for (int pass = 0; pass < passes; ++pass) {
    int from = slot_bits * pass / passes, bits = slot_bits * (pass + 1) / passes - from;
    uint32_t mask = (1u << bits) - 1, next[1 << kMaxDigit];
    std::fill(next, next + mask + 1, 0u);
    for (int64_t i = 0; i < n; ++i) ++next[(pairs[i] >> (32 + from)) & mask];
    uint32_t begin = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) begin += std::exchange(next[digit], begin);
    for (int64_t i = 0; i < n; ++i) spare[next[(pairs[i] >> (32 + from)) & mask]++] = pairs[i];
    std::swap(pairs, spare);
  }
  return pairs;
}

}  // namespace shoal
