#include "kernels/sums.h"

#include <algorithm>
#include <array>

namespace shoal {

bool keys_repeat(const GradientRow* features, int64_t feature_count, const Bags& bags) {
  // Too few positions for the sample to be worth its time.
  constexpr int64_t kLeast = 512;
  constexpr int64_t kSample = 128;
  constexpr uint32_t kPlaces = 512;
  int64_t positions = 0;
  for (int64_t f = 0; f < feature_count; ++f) positions += features[f].end - features[f].begin;
  if (positions < kLeast) return false;
  std::array<uint32_t, kPlaces> seen;
  seen.fill(kNoSlot);
  int64_t again = 0, sampled = 0;
  for (int64_t f = 0; f < feature_count; ++f) {
    const GradientRow& in = features[f];
    const int64_t n = in.end - in.begin, take = n * kSample / positions;
    const uint32_t* slots = bags.slots_of(in.feature->slot_list) + in.begin;
    for (int64_t i = 0; i < take; ++i) {
      const uint32_t slot = slots[n * i / take];
      if (slot == kNoSlot) continue;
      ++sampled;
      uint32_t place = spread(slot) >> 23;
      while (seen[place] != kNoSlot && seen[place] != slot) place = (place + 1) % kPlaces;
      again += seen[place] == slot;
      seen[place] = slot;
    }
  }
  // Where each row comes twice, a sample of s from n positions has about s^2 / n rows again.
  return again >= 2 && again * positions >= sampled * sampled;
}

}  // namespace shoal
