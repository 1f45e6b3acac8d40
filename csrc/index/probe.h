// Batched find, compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"
#include "index/bucket.h"

namespace shoal {

struct Probe {
  // slots[i] = the slot of keys[i], or kNoSlot; returns how many are missing.
  size_t (*find64)(const IndexView& view, const int64_t* keys, size_t n, uint32_t* slots);
  size_t (*find32)(const IndexView& view, const int32_t* keys, size_t n, uint32_t* slots);
};

SHOAL_DISPATCH(Probe, probe)

}  // namespace shoal
