// s += g^2;  w -= lr g / (sqrt(s) + eps).  Settings: 0 eps. State: s [dim].
#pragma once

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

struct Adagrad {
  static void step(float* w, const float* g, float, float* s, int32_t dim, const Hyper& h) {
    const float eps = static_cast<float>(h.setting[0]);
    for (int32_t i = 0; i < dim; ++i) {
      s[i] += g[i] * g[i];
      w[i] -= h.lr * g[i] / (__builtin_sqrtf(s[i]) + eps);
    }
  }
};

}  // namespace shoal::SHOAL_ISA
