// The forward of a batch: slots from the indexes, then rows to outputs.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rwlock.h"
#include "index/batch.h"
#include "index/index.h"
#include "kernels/batch.h"
#include "kernels/pool.h"

namespace shoal {

// One feature of a batch in one table.
struct LookupPart {
  const Index* index = nullptr;
  PoolFeature feature;
  bool waits = false;  // keys without a row get one before they are read
};

// A task that waits for rows, and the number of its part.
struct WaitingTask {
  size_t part;
  PoolTask task;
};

// What a lookup did.
struct Found {
  std::vector<int64_t> missing;   // keys without a slot, by part
  std::vector<WaitingTask> rest;  // what is to be pooled once the missing keys have rows
};

// Writes slots[slot_list * n + i] of every position of every part, and pools what waits for nothing. `known`, if it is
// not null: the keys when the batch was staged. Those that had a row then have their slots already, which are still
// right; positions whose key has changed since are looked up again.
// `parts` must stay where they are until the rest is pooled.
Found lookup(const std::vector<LookupPart>& parts, const Bags& bags, uint32_t* slots, const void* known,
             Dtype out_dtype, int threads);

// REQUIRES: every position of the parts that wait has its slot.
void pool_rest(const std::vector<LookupPart>& parts, const std::vector<WaitingTask>& rest, const Bags& bags,
               uint32_t* slots, Dtype out_dtype, int threads);

// Finds slots ahead of the lookup. Runs concurrently with threads that change indexes, and releases the lock after each
// chunk of keys. The keys are copied to `kept`, and the slots are those of the copies, even if the batch's keys change
// later. Returns, by part, which positions have none.
// `bounds`: where each feature's keys begin, and the end, from offsets that were checked: the batch's own may be
// written to meanwhile.
std::vector<Lacking> find_ahead(const std::vector<LookupPart>& parts, const Bags& bags,
                                const std::vector<int64_t>& bounds, void* kept, uint32_t* slots, RwLock& indexes,
                                int threads);

}  // namespace shoal
