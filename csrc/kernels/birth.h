// The first row of a key: a function of (seed, table, key) alone. docs/formats.md specifies every bit.
#pragma once

#include <cstdint>

namespace shoal {

enum class InitKind : int { zeros = 0, constant = 1, uniform = 2, normal = 3 };

struct Init {
  InitKind kind = InitKind::zeros;
  float a = 0;  // constant: the value; uniform: low; normal: mean
  float b = 0;  // uniform: high - low; normal: standard deviation
  uint64_t stream = 0;
};

}  // namespace shoal
