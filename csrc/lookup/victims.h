// Chooses the rows that leave memory when others need their place: those that were used longest ago.
//
// Rows are looked at in portions, in the order of the index, which is that of a hash: a portion is a fair sample of the
// table. Its oldest part waits in a queue until it is needed, so a row that leaves costs a look at a few others, however
// many there are.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rows.h"
#include "index/index.h"

namespace shoal {

// Slots that must not leave.
class Pins {
 public:
  explicit Pins(const Rows& rows) : bits_((size_t(rows.slab_count) << rows.slot_bits) / 64 + 1) {}

  void add(const uint32_t* slots, int64_t n) {
    // A batch that was staged before rows were replaced may have slots that are gone.
    for (int64_t i = 0; i < n; ++i)
      if (slots[i] / 64 < bits_.size()) bits_[slots[i] / 64] |= uint64_t{1} << (slots[i] % 64);
  }
  bool has(uint32_t slot) const { return slot / 64 < bits_.size() && bits_[slot / 64] >> (slot % 64) & 1; }
  int64_t count() const;

 private:
  std::vector<uint64_t> bits_;
};

class Victims {
 public:
  struct Chosen {
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots;
    int64_t dirty = 0;  // the first of them, which are dirty
  };

  // Returns up to n rows that are not pinned; fewer only if there are no more.
  Chosen choose(const Index& index, const Rows& rows, uint32_t clock, const Pins& pins, int64_t n);

 private:
  struct Candidate {
    int64_t key;
    uint32_t slot;
    uint32_t age;
    uint32_t stamp;  // when it was queued
  };
  // Puts the oldest `share` of the next portion into the empty queue; adds the portion's buckets to `seen`.
  void look_further(const Index& index, const Rows& rows, uint32_t clock, double share, uint64_t* seen);

  std::vector<Candidate> queue_;  // the oldest last
  uint64_t next_bucket_ = 0;
};

}  // namespace shoal
