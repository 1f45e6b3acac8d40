// Rows that were read ahead come into memory, for several tables at a time.
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
  int64_t came = 0;    // out: of those that were not there by now
  Status status = {};  // out: where memory is refused, none came
};

// Puts them where they are not there yet, and gives every position of the batch that lacked a slot the one that its key has
// now. `indexes` is held alone while indexes change. REQUIRES: nobody else changes these tables.
void place(std::vector<Placing>* tables, RwLock& indexes, const MissingKeys& missing, uint32_t* slots, int threads);

}  // namespace shoal
