// The gradient is the new row. Its reductions leave out gradients of zeros: see Reduce.
#pragma once

#include "kernels/update.h"

namespace shoal::SHOAL_ISA {

struct Assign {
  static void step(float* w, const float* g, float, float*, int32_t dim, const Hyper&) {
    for (int32_t i = 0; i < dim; ++i) w[i] = g[i];
  }
};

}  // namespace shoal::SHOAL_ISA
