#include "kernels/sort.h"

#include <algorithm>
#include <utility>

namespace shoal {

// Two passes of up to 11 bits sort the slots of a table of two million rows; 2048 counters stay in the first-level cache.
static constexpr int kMaxDigit = 11;
static constexpr int64_t kInsertionBelow = 24;

namespace {

// All digits are counted in one sweep: a hot row's counters then wait for each other side by side.
template <int Passes>
const uint64_t* radix_sort(uint64_t* pairs, uint64_t* spare, int64_t n, int slot_bits) {
  uint32_t next[Passes][1 << kMaxDigit];
  int shift[Passes];
  uint32_t mask[Passes];
  for (int pass = 0; pass < Passes; ++pass) {
    int from = slot_bits * pass / Passes, bits = slot_bits * (pass + 1) / Passes - from;
    shift[pass] = 32 + from;
    mask[pass] = (1u << bits) - 1;
    std::fill(next[pass], next[pass] + mask[pass] + 1, 0u);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int pass = 0; pass < Passes; ++pass) ++next[pass][(pairs[i] >> shift[pass]) & mask[pass]];
  for (int pass = 0; pass < Passes; ++pass) {
    uint32_t begin = 0;
    for (uint32_t digit = 0; digit <= mask[pass]; ++digit) begin += std::exchange(next[pass][digit], begin);
    for (int64_t i = 0; i < n; ++i) spare[next[pass][(pairs[i] >> shift[pass]) & mask[pass]]++] = pairs[i];
    std::swap(pairs, spare);
  }
  return pairs;
}

}  // namespace

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
  switch ((slot_bits + kMaxDigit - 1) / kMaxDigit) {
    case 0: return pairs;
    case 1: return radix_sort<1>(pairs, spare, n, slot_bits);
    case 2: return radix_sort<2>(pairs, spare, n, slot_bits);
    default: return radix_sort<3>(pairs, spare, n, slot_bits);
  }
}

}  // namespace shoal
