// A batch as the kernels see it: bags of keys, feature by feature, and the slots an index found for them.
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "base/status.h"

namespace shoal {

struct Bags {
  const void* keys = nullptr;     // [n]
  const void* offsets = nullptr;  // [features * batch + 1]
  bool narrow_keys = false;       // int32 rather than int64
  bool narrow_offsets = false;
  int64_t batch = 0;
  int64_t count = 0;                // n
  const uint32_t* slots = nullptr;  // [slot lists, n]: a feature that feeds several tables has a slot list for each
  const float* weights = nullptr;   // [n], or null

  SHOAL_INLINE int64_t key(int64_t i) const {
    return narrow_keys ? static_cast<const int32_t*>(keys)[i] : static_cast<const int64_t*>(keys)[i];
  }
  SHOAL_INLINE const uint32_t* slots_of(int64_t slot_list) const { return slots + slot_list * count; }
  SHOAL_INLINE int64_t offset(int64_t i) const {
    return narrow_offsets ? static_cast<const int32_t*>(offsets)[i] : static_cast<const int64_t*>(offsets)[i];
  }
};

// Offsets that begin at 0, never decrease and end at the number of keys; else what is wrong with them.
Status check(const Bags& bags, int64_t features, int64_t keys);

}  // namespace shoal
