// The index's work for a whole batch: many tables, one call, several threads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "index/index.h"

namespace shoal {

// Keys of one feature: positions [begin, end) of a batch belong to `index`; position i has its slot at slots[shift + i].
struct KeyRange {
  const Index* index;
  int64_t begin;
  int64_t end;
  int64_t shift = 0;
};

// A batch's keys as they came: int64, or int32 if `narrow`.
struct Keys {
  const void* data;
  bool narrow;
  int64_t operator[](int64_t i) const {
    return narrow ? static_cast<const int32_t*>(data)[i] : static_cast<const int64_t*>(data)[i];
  }
};

// The slot of every position of the ranges; missing[r] = how many of range r have no slot.
void find(const std::vector<KeyRange>& ranges, Keys keys, uint32_t* slots, int64_t* missing, int threads);

// The keys of one table that have no slot: each once, in order of first appearance, and where they stand in the batch.
struct Missing {
  std::vector<int64_t> keys;
  std::vector<int64_t> positions;
  std::vector<int64_t> places;  // where the slots of the positions are
  std::vector<uint32_t> which;  // positions[i] holds keys[which[i]]

  // Gives every position the slot of its key.
  void fill(const uint32_t* slots_of_keys, uint32_t* slots) const;
};

// REQUIRES: `ranges` are of one table and `slots` came from find.
Missing collect_missing(const std::vector<KeyRange>& ranges, Keys keys, const uint32_t* slots);

}  // namespace shoal
