// m = momentum m + g;  w -= lr m, or lr (g + momentum m) with Nesterov.
// Settings: 0 momentum, 1 Nesterov (0 or 1). State: m [dim].
#pragma once

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

struct Momentum {
  static void step(float* w, const float* g, float, float* m, int32_t dim, const Hyper& h) {
    const float momentum = static_cast<float>(h.setting[0]);
    const bool nesterov = h.setting[1] != 0.0;
    for (int32_t i = 0; i < dim; ++i) {
      m[i] = momentum * m[i] + g[i];
      w[i] -= h.lr * (nesterov ? g[i] + momentum * m[i] : m[i]);
    }
  }
};

}  // namespace shoal::SHOAL_ISA
