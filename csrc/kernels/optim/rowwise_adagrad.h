// s += mean(g^2);  w -= lr g / (sqrt(s) + eps).  Settings: 0 eps. State: s [1].
#pragma once

#include "kernels/update.h"
#include "kernels/vec.h"

namespace shoal::SHOAL_ISA {

struct RowwiseAdagrad {
  static void step(float* w, const float* g, float squares, float* s, int32_t dim, const Hyper& h) {
    s[0] += squares / static_cast<float>(dim);
    const float rate = h.lr / (__builtin_sqrtf(s[0]) + static_cast<float>(h.setting[0]));
    for (int32_t i = 0; i < dim; ++i) w[i] -= rate * g[i];
  }
};

}  // namespace shoal::SHOAL_ISA
