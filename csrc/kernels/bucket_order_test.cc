#include "kernels/bucket_order.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/hash.h"

namespace shoal {
namespace {

void keys_come_by_bucket_and_keep_their_order() {
  for (uint64_t buckets : {1ull, 2ull, 1000ull, 4096ull, 4097ull, 1ull << 24, (1ull << 31) - 1})
    for (int64_t n : {0, 1, 2, 5000}) {
      std::vector<int64_t> keys(static_cast<size_t>(n)), order(keys.size()), wanted(keys.size());
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i * i) - 300;
      std::iota(wanted.begin(), wanted.end(), 0);
      std::stable_sort(wanted.begin(), wanted.end(), [&](int64_t a, int64_t b) {
        return bucket_of(keys[static_cast<size_t>(a)], buckets) < bucket_of(keys[static_cast<size_t>(b)], buckets);
      });
      order_by_bucket(keys.data(), n, buckets, order.data());
      CHECK(order == wanted, buckets, n);
    }
}

}  // namespace
}  // namespace shoal

int main() { shoal::keys_come_by_bucket_and_keep_their_order(); }
