// Keys that come into the memory of tables, and leave it. An index and its store change in one call: a caller that is
// interrupted is so before it or behind it, and no slot is lost in between.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/status.h"
#include "index/index.h"
#include "store/dram.h"

namespace shoal {

// Keys of one table that come.
struct Arrival {
  Index* index = nullptr;
  DramStore* store = nullptr;
  const int64_t* keys = nullptr;
  int64_t n = 0;
  uint32_t* slots = nullptr;  // out
};

// Gives all keys of all tables a slot, or none. REQUIRES: store->reserve(n) succeeded, and the keys are absent and differ.
Status arrive(const std::vector<Arrival>& tables, int threads);

// Takes keys out, and frees their slots; those that are not there are left alone. Asks for no memory.
void leave(Index* index, DramStore* store, const int64_t* keys, int64_t n);

// Moves rows from their slots to the lowest free ones, of which there are n. Throws std::bad_alloc before anything changes.
void relocate(Index* index, DramStore* store, const int64_t* keys, const uint32_t* slots, int64_t n);

// Slots of erased rows that forwards may hold until their leases end. Leases are numbered as they begin.
class Limbo {
 public:
  bool any() const { return !waiting_.empty(); }
  // Takes keys out and flags their rows as erased; their slots are free once the leases up to `lease` have ended. Throws
  // std::bad_alloc before anything changes.
  void erase(Index* index, const DramStore& store, const int64_t* keys, int64_t n, int64_t lease);
  // Frees the slots whose leases are all older than the oldest that is alive, if one is.
  void free(DramStore& store, std::optional<int64_t> oldest);

 private:
  struct Waiting {
    int64_t lease;
    std::vector<uint32_t> slots;
  };
  std::deque<Waiting> waiting_;
};

}  // namespace shoal
