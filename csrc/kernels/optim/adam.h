// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr / c1 m / (sqrt(v / c2) + eps), c = 1 - b^t.
// Settings: 0 beta1, 1 beta2, 2 eps, 3 and 4 as in bias.h. State: m [dim], v [dim], count [1] where rows count.
#pragma once

#include "kernels/optim/bias.h"

namespace shoal::SHOAL_ISA {

struct Adam {
  static void step(float* w, const float* g, float, float* state, int32_t dim, const Hyper& h) {
    float* m = state;
    float* v = state + dim;
    const Bias bias = bias_correction(state + 2 * dim, h);
    const float b1 = static_cast<float>(h.setting[0]), rest1 = static_cast<float>(1.0 - h.setting[0]);
    const float b2 = static_cast<float>(h.setting[1]), rest2 = static_cast<float>(1.0 - h.setting[1]);
    const float eps = static_cast<float>(h.setting[2]);
    const float rate = h.lr / bias.first, root = __builtin_sqrtf(bias.second);
    for (int32_t i = 0; i < dim; ++i) {
      m[i] = b1 * m[i] + rest1 * g[i];
      v[i] = b2 * v[i] + rest2 * g[i] * g[i];
      w[i] -= rate * m[i] / (__builtin_sqrtf(v[i]) / root + eps);
    }
  }
};

}  // namespace shoal::SHOAL_ISA
