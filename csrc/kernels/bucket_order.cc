#include "kernels/bucket_order.h"

#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/memory.h"

namespace shoal {

// As many counters stay in the first-level cache, and the usual 4096 buckets take one pass.
static constexpr int kDigitBits = 12;

void order_by_bucket(const int64_t* keys, int64_t n, uint64_t buckets, int64_t* order) {
  // bucket << 32 | position, sorted by its digits above 32, the lowest first.
  Kept<uint64_t> first(static_cast<size_t>(n)), second(static_cast<size_t>(n));
  uint64_t *from = first.get(), *to = second.get();
  for (int64_t i = 0; i < n; ++i) from[i] = bucket_of(keys[i], buckets) << 32 | static_cast<uint64_t>(i);
  constexpr uint64_t kMask = (uint64_t{1} << kDigitBits) - 1;
  for (int shift = 32; shift < 64 && (buckets - 1) >> (shift - 32); shift += kDigitBits) {
    std::vector<int64_t> begin(kMask + 2, 0);
    for (int64_t i = 0; i < n; ++i) ++begin[(from[i] >> shift & kMask) + 1];
    for (size_t digit = 1; digit < begin.size(); ++digit) begin[digit] += begin[digit - 1];
    for (int64_t i = 0; i < n; ++i) to[begin[from[i] >> shift & kMask]++] = from[i];
    std::swap(from, to);
  }
  for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int64_t>(from[i] & 0xffffffffu);
}

}  // namespace shoal
