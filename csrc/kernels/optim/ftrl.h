// FTRL-Proximal: s = (sqrt(n + g^2) - sqrt(n)) / lr;  z += g - s w;  n += g^2;
// w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).
// Settings: 0 l1, 1 l2, 2 beta. State: z [dim], n [dim].
#pragma once

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

struct Ftrl {
  static void step(float* w, const float* g, float, float* state, int32_t dim, const Hyper& h) {
    float* z = state;
    float* n = state + dim;
    const float l1 = static_cast<float>(h.setting[0]), l2 = static_cast<float>(h.setting[1]);
    const float beta = static_cast<float>(h.setting[2]);
    for (int32_t i = 0; i < dim; ++i) {
      const float grown = n[i] + g[i] * g[i], root = __builtin_sqrtf(grown);
      z[i] += g[i] - (root - __builtin_sqrtf(n[i])) / h.lr * w[i];
      n[i] = grown;
      const float excess = z[i] < 0.0f ? z[i] + l1 : z[i] - l1;
      const bool kept = z[i] < 0.0f ? -z[i] > l1 : z[i] > l1;
      w[i] = kept ? -excess / ((beta + root) / h.lr + l2) : 0.0f;
    }
  }
};

}  // namespace shoal::SHOAL_ISA
