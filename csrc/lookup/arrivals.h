// Keys that enter and leave the memory of tables. An index and its store change in one call: an interrupt of the caller
// comes before or after that call, so no slot is lost in between.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/status.h"
#include "index/index.h"
#include "store/dram.h"

namespace shoal {

// Keys of one table that enter memory.
struct Arrival {
  Index* index = nullptr;
  DramStore* store = nullptr;
  const int64_t* keys = nullptr;
  int64_t n = 0;
  uint32_t* slots = nullptr;  // out
};

// Gives all keys of all tables a slot, or none. REQUIRES: store->reserve(n) succeeded, and the keys are absent and differ.
Status arrive(const std::vector<Arrival>& tables, int threads);

// Removes keys and frees their slots. Keys that are not there are skipped. Allocates no memory.
void leave(Index* index, DramStore* store, const int64_t* keys, int64_t n);

// Moves rows from their slots to the lowest free ones, of which there are n. Throws std::bad_alloc before anything changes.
void relocate(Index* index, DramStore* store, const int64_t* keys, const uint32_t* slots, int64_t n);

// Slots of erased rows that forwards may still hold, until their leases end. Leases are numbered in the order in which
// they begin.
class Limbo {
 public:
  bool any() const { return !waiting_.empty(); }
  // Removes keys and flags their rows as erased. Their slots are free once the leases up to `lease` have ended. Throws
  // std::bad_alloc before anything changes.
  void erase(Index* index, const DramStore& store, const int64_t* keys, int64_t n, int64_t lease);
  // Frees the slots whose leases are all older than `oldest`, the oldest one that is alive, if any is.
  void free(DramStore& store, std::optional<int64_t> oldest);

 private:
  struct Waiting {
    int64_t lease;
    std::vector<uint32_t> slots;
  };
  std::deque<Waiting> waiting_;
};

}  // namespace shoal
