// Puts rows that were read ahead into memory, for several tables at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rwlock.h"
#include "base/status.h"
#include "index/batch.h"
#include "index/index.h"
#include "store/dram.h"

namespace shoal {

// Rows of one table, packed, by key. The keys differ.
struct Placing {
  Index* index = nullptr;
  DramStore* store = nullptr;
  const int64_t* keys = nullptr;
  const char* rows = nullptr;
  int64_t n = 0;
  uint32_t clock = 0;
  size_t table = 0;    // of the batch's missing keys
  int64_t came = 0;    // out: how many were not in memory before
  Status status = {};  // out: if memory is refused, none came
};

// Puts in rows that are not in memory yet, and gives every position of the batch that lacked a slot the one that its
// key has now. Takes `indexes` exclusively while indexes change. REQUIRES: no other thread changes these tables.
void place(std::vector<Placing>* tables, RwLock& indexes, const MissingKeys& missing, uint32_t* slots, int threads);

}  // namespace shoal
