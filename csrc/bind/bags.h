// A batch as Python hands it over: addresses of tensors that the caller keeps alive, and slots of its own.
#pragma once

#include <atomic>

#include "base/memory.h"
#include "bind/bind.h"
#include "index/batch.h"
#include "lookup/lookup.h"

namespace shoal {

// Keys looked up in a table, those that had a row in memory, and those that had one below. Any thread may add.
struct Tally {
  std::atomic<int64_t> lookups{0};
  std::atomic<int64_t> hits{0};
  std::atomic<int64_t> fetched{0};
};

class BoundBags {
 public:
  // Integers at an address, of 32 bits if `narrow`.
  struct Numbers {
    uintptr_t address;
    int64_t count;
    bool narrow;
  };

  BoundBags(Numbers keys, Numbers offsets, uintptr_t weights, int64_t features, int64_t copies);

  // Takes other tensors of the same batch. Raises if their features begin elsewhere.
  void bind_again(Numbers keys, Numbers offsets, uintptr_t weights);

  // Before slots are found ahead of the lookup: keeps the offsets as they are now, has room for the keys, and knows no slot.
  void begin_ahead();
  // Whether these are as many keys in the bags that it keeps.
  bool has_bags_of(Numbers keys, Numbers offsets) const;
  void* kept_keys() { return kept_.get(); }

  const Bags& bags() const { return bags_; }
  uint32_t* slots() { return slots_.get(); }
  // The keys that the slots are of: the tensor's, or those that are kept.
  Keys keys() const { return {are_kept ? kept_.get() : bags_.keys, bags_.narrow_keys}; }
  bool are_kept = false;
  // Whether the batch's backward is done: it is from the call on that changes rows, or that leaves them.
  bool applied = false;
  const std::vector<int64_t>& bounds() const { return bounds_; }
  KeyRange range(int64_t source, int64_t copy) const {
    return {nullptr, bounds_[size_t(source)], bounds_[size_t(source) + 1], copy * bags_.count};
  }

  // Of the lookup: what waits for births, and what is to be counted once nothing can fail.
  struct Count {
    Tally* tally;
    int64_t lookups, hits;
  };
  std::vector<LookupPart> parts;
  std::vector<WaitingTask> rest;
  std::vector<Count> counts;
  Dtype out_dtype = Dtype::f32;

  void count();

 private:
  void point_to(Numbers keys, Numbers offsets, uintptr_t weights);
  std::vector<int64_t> bounds_now() const;

  Bags bags_;
  int64_t features_;
  std::vector<int64_t> bounds_;  // where each feature's keys begin, and the end
  size_t slot_count_;
  Kept<uint32_t> slots_;
  Kept<char> kept_{0};
};

}  // namespace shoal
