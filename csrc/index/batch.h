// The index's work for a whole batch: many tables, one call, several threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
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

// Returns keys in ascending order, without those of `others`, which are in order.
std::vector<int64_t> keys_without(std::span<const int64_t> keys, std::span<const std::span<const int64_t>> others);

// Writes the slot of every position of the ranges; missing[r] = how many of range r have no slot.
void find(const std::vector<KeyRange>& ranges, Keys keys, uint32_t* slots, int64_t* missing, int threads);

// Positions of one feature, in ascending order, that have no slot; position i would have its own at slots[shift + i].
struct Lacking {
  int64_t shift = 0;
  std::vector<int64_t> positions;
};

// The keys of a batch that have no slot in their table: each once, in order of first appearance, and where they stand.
class MissingKeys {
 public:
  // `tables[t]` are the ranges of one table. REQUIRES: `slots` came from find.
  MissingKeys(const std::vector<std::vector<KeyRange>>& tables, Keys keys, const uint32_t* slots, int threads);
  // The same if it is known which positions have none.
  MissingKeys(const std::vector<std::vector<const Lacking*>>& tables, Keys keys, int threads);

  struct Table {
    int64_t count = 0;         // distinct keys
    int64_t places_count = 0;  // positions that hold them
    int64_t* keys = nullptr;
    int64_t* places = nullptr;         // where the slots of the positions are
    uint32_t* which = nullptr;         // the slot at places[i] is that of keys[which[i]]
    std::vector<int64_t> count_after;  // by range: distinct keys of it and those before
  };
  const std::vector<Table>& tables() const { return tables_; }
  // Gives every position of a table the slot of its key.
  void fill(size_t table, const uint32_t* slots_of_keys, uint32_t* slots) const;

 private:
  template <typename Feature, typename Where>
  void collect_all(const std::vector<std::vector<Feature>>& tables, const Where& where, Keys keys, int threads);

  std::vector<Table> tables_;
  Kept<char> memory_;  // one piece for all tables: fresh memory costs more than the work in it
};

}  // namespace shoal
