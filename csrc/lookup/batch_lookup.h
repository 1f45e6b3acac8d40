// The lookup of a batch in two phases: outputs whose rows are all in memory are written at once, the others after their
// keys have rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "base/rwlock.h"
#include "base/status.h"
#include "index/batch.h"
#include "lookup/lookup.h"

namespace shoal {

// Keys looked up in a table, those that had a row in memory, and those that had one below. Any thread may add.
struct Tally {
  std::atomic<int64_t> lookups{0};
  std::atomic<int64_t> hits{0};
  std::atomic<int64_t> fetched{0};
};

// A batch: where its tensors are, which the caller keeps alive, slots of its own, and what its lookup left to do.
class LookupBatch {
 public:
  // Integers, of 32 bits if `narrow`.
  struct Numbers {
    const void* data;
    int64_t count;
    bool narrow;
  };

  LookupBatch(Numbers keys, Numbers offsets, const float* weights, int64_t features, int64_t slot_lists);
  // Checks the offsets. REQUIRES for all other methods: this returned ok.
  Status check() const { return shoal::check(bags_, features_, bags_.count); }

  // Takes other tensors of the same batch. An error if their features begin elsewhere.
  Status bind_again(Numbers keys, Numbers offsets, const float* weights);

  // Before slots are found ahead of the lookup: keeps the offsets as they are now, has room for the keys, and knows no slot.
  void begin_ahead();
  // Whether these are as many keys, in the same bags as those it keeps.
  bool has_bags_of(Numbers keys, Numbers offsets) const;

  const Bags& bags() const { return bags_; }
  uint32_t* slots() { return slots_.get(); }
  // The keys that the slots belong to: the tensor's, or those that are kept.
  Keys keys() const { return {are_kept_ ? kept_.get() : bags_.keys, bags_.narrow_keys}; }
  const std::vector<int64_t>& bounds() const { return bounds_; }
  KeyRange range(int64_t source, int64_t slot_list) const {
    return {nullptr, bounds_[static_cast<size_t>(source)], bounds_[static_cast<size_t>(source) + 1],
            slot_list * bags_.count};
  }

  // Pools the outputs that waited for rows, and counts the lookup. REQUIRES: every position of the parts that wait has
  // its slot.
  void finish(int threads);

  // Whether the batch's backward is done: true from the call on that changes rows, or decides to leave them unchanged.
  bool applied = false;

 private:
  friend class BatchLookup;

  struct Count {
    Tally* tally;
    int64_t lookups, hits;
  };

  void point_to(Numbers keys, Numbers offsets, const float* weights);
  std::vector<int64_t> bounds_now() const;

  Bags bags_;
  int64_t features_;
  std::vector<int64_t> bounds_;  // where each feature's keys begin, and the end
  size_t slot_count_;
  Kept<uint32_t> slots_;
  Kept<char> kept_{0};
  bool are_kept_ = false;

  // Of the lookup: what waits for rows, and what is counted once nothing can fail any more.
  std::vector<LookupPart> parts_;
  std::vector<WaitingTask> rest_;
  std::vector<Count> counts_;
  Dtype out_dtype_ = Dtype::f32;
};

// How one feature of a batch is looked up in one table.
struct LookupFeature {
  const Index* index = nullptr;
  PoolFeature pool;  // without a place for the output
  Tally* tally = nullptr;
  int64_t column = 0;    // of the output that all features share
  bool trains = false;   // in training, keys without a row get one
  bool fetches = false;  // keys without a row in memory may have one below
};

// The features of a batch, in one order, and the tables that they are looked up in.
class BatchLookup {
 public:
  void add(const LookupFeature& feature) { features_.push_back(feature); }

  // Finds slots, unless they are `known`, and pools rows into the output. `out` has `width` columns for all features,
  // or, if that is negative, the rows of each feature after those of the one before. If some output waits for rows,
  // returns how many keys each feature lacks, and LookupBatch::finish() writes the rest; else returns an empty vector.
  std::vector<int64_t> run(LookupBatch& batch, char* out, int64_t width, Dtype dtype, bool training, bool known,
                           int threads) const;

  // Finds slots only; other threads may change the indexes meanwhile. `tables`: the features of each table whose keys
  // may be in a lower tier. Returns the keys that have no slot.
  MissingKeys find(LookupBatch& batch, RwLock& indexes, const std::vector<std::vector<size_t>>& tables,
                   int threads) const;

 private:
  std::vector<LookupFeature> features_;
};

}  // namespace shoal
