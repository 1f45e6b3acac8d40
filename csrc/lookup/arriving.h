// Keys that come into the memory of tables, and leave it. An index and its store change in one call: a caller that is
// interrupted is so before it or behind it, and no slot is lost in between.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "index/index.h"
#include "store/dram.h"

namespace shoal {

// Keys of one table that come.
struct Arriving {
  Index* index = nullptr;
  DramStore* store = nullptr;
  const int64_t* keys = nullptr;
  int64_t n = 0;
  uint32_t* slots = nullptr;  // out
};

// Gives all keys of all tables a slot, or none. REQUIRES: store->reserve(n) succeeded, and the keys are absent and differ.
Status arrive(const std::vector<Arriving>& tables, int threads);

// Takes keys out, and frees their slots; those that are not there are left alone. Asks for no memory.
void leave(Index* index, DramStore* store, const int64_t* keys, int64_t n);

}  // namespace shoal
