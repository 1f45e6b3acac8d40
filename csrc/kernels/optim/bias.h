// Adam's bias correction: by the row's own count of updates, or by the table's step.
#pragma once

#include <cmath>

#include "kernels/update.h"
#include "kernels/vec.h"

namespace shoal::SHOAL_ISA {

// 1 - beta^t for both betas.
struct Bias {
  float first;
  float second;
};

// Counts one update more, and returns how many there were. A float32 counts to 2^24; from there on each update makes it the
// next larger float32. It stops at the largest, where the correction is 1 for every beta that is below 1 as a float32.
static inline double count_update(float* count) {
  constexpr float kExact = 0x1p24f;
  constexpr uint32_t kMost = 0x7f7fffffu;
  if (*count < kExact) return *count += 1.0f;
  const uint32_t bits = bits_of(*count);
  if (bits < kMost) *count = float_of(bits + 1);
  return static_cast<double>(kExact) + (bits_of(*count) - bits_of(kExact));
}

// Settings: 0 beta1, 1 beta2, 3 and 4 the table-wide corrections, or 0 where rows count for themselves. `count` is the
// row's state column, unused if table-wide.
static inline Bias bias_correction(float* count, const Hyper& h) {
  if (h.setting[3] != 0.0) return {static_cast<float>(h.setting[3]), static_cast<float>(h.setting[4])};
  const double updates = count_update(count);
  return {static_cast<float>(1.0 - std::pow(h.setting[0], updates)),
          static_cast<float>(1.0 - std::pow(h.setting[1], updates))};
}

}  // namespace shoal::SHOAL_ISA
