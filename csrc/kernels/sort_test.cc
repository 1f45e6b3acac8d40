#include "kernels/sort.h"

#include <algorithm>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

void sorts_as_std_stable_sort() {
  Random random(1);
  for (int64_t n : {0, 1, 2, 3, 22, 23, 24, 25, 511, 1000, 5000})
    for (int slot_bits : {0, 1, 5, 8, 9, 10, 17, 18, 19, 27, 28, 31, 32})
      for (bool few : {false, true}) {
        uint64_t range = uint64_t{1} << slot_bits;
        uint64_t high = slot_bits < 32 ? (random.next() & 0xffffffffu) >> slot_bits << slot_bits : 0;
        std::vector<uint64_t> pairs, spare(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) {
          uint64_t low = random.next() % (few ? std::min<uint64_t>(range, 3) : range);
          pairs.push_back((high | low) << 32 | static_cast<uint64_t>(i));
        }
        std::vector<uint64_t> wanted = pairs;
        std::stable_sort(wanted.begin(), wanted.end(), [](uint64_t a, uint64_t b) { return a >> 32 < b >> 32; });
        const uint64_t* sorted = sort_by_slot(pairs.data(), spare.data(), n, slot_bits);
        CHECK(n == 0 || sorted == pairs.data() || sorted == spare.data());
        for (int64_t i = 0; i < n; ++i) CHECK(sorted[i] == wanted[static_cast<size_t>(i)], n, slot_bits, i);
      }
}

void keeps_positions_that_use_all_their_bits() {
  std::vector<uint64_t> pairs, spare(100);
  for (uint64_t i = 0; i < 100; ++i) pairs.push_back((i * 37 % 4) << 32 | (0xffffff00u + i));
  std::vector<uint64_t> wanted = pairs;
  std::sort(wanted.begin(), wanted.end());
  const uint64_t* sorted = sort_by_slot(pairs.data(), spare.data(), 100, 2);
  CHECK(std::equal(wanted.begin(), wanted.end(), sorted));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::sorts_as_std_stable_sort();
  shoal::keeps_positions_that_use_all_their_bits();
}
