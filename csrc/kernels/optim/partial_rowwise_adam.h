// Adam whose second moment is one number a row: v = b2 v + (1 - b2) mean(g^2).
// Settings: as Adam's. State: m [dim], v [1], count [1] where rows count.
#pragma once

#include "kernels/optim/bias.h"
#include "kernels/vec.h"

namespace shoal::SHOAL_ISA {

struct PartialRowwiseAdam {
  static void step(float* w, const float* g, float squares, float* state, int32_t dim, const Hyper& h) {
    float* m = state;
    float* v = state + dim;
    const Bias bias = bias_correction(state + dim + 1, h);
    const float b1 = static_cast<float>(h.setting[0]), rest1 = static_cast<float>(1.0 - h.setting[0]);
    const float b2 = static_cast<float>(h.setting[1]), rest2 = static_cast<float>(1.0 - h.setting[1]);
    const float eps = static_cast<float>(h.setting[2]);
    v[0] = b2 * v[0] + rest2 * (squares / static_cast<float>(dim));
    const float rate = h.lr / bias.first / (__builtin_sqrtf(v[0]) / __builtin_sqrtf(bias.second) + eps);
    for (int32_t i = 0; i < dim; ++i) {
      m[i] = b1 * m[i] + rest1 * g[i];
      w[i] -= rate * m[i];
    }
  }
};

}  // namespace shoal::SHOAL_ISA
