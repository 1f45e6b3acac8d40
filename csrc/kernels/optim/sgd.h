// w -= lr g
#pragma once

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

struct Sgd {
  static void step(float* w, const float* g, float, float*, int32_t dim, const Hyper& h) {
    for (int32_t i = 0; i < dim; ++i) w[i] -= h.lr * g[i];
  }
};

}  // namespace shoal::SHOAL_ISA
