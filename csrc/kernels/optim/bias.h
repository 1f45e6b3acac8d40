// Adam's bias correction: by the row's own count of updates, or by the table's step.
#pragma once

#include <cmath>

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

// 1 - beta^t for both betas.
struct Bias {
  float first;
  float second;
};

// Settings: 0 beta1, 1 beta2, 3 and 4 the table-wide corrections, or 0 where rows count for themselves. `count` is the
// row's state column, unused if table-wide.
static inline Bias bias_correction(float* count, const Hyper& h) {
  if (h.setting[3] != 0.0) return {static_cast<float>(h.setting[3]), static_cast<float>(h.setting[4])};
  count[0] += 1.0f;
  // A float counts exactly to 2^24; both corrections are 1 long before.
  return {static_cast<float>(1.0 - std::pow(h.setting[0], static_cast<double>(count[0]))),
          static_cast<float>(1.0 - std::pow(h.setting[1], static_cast<double>(count[0])))};
}

}  // namespace shoal::SHOAL_ISA
