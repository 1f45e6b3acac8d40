// Where the rows of a table lie. A store and the kernels share nothing else. shoal/config/rows.py computes the same layout.
//
//   slot  = slab number << slot_bits | row in slab
//   slab  = weights of every row (weight_bytes each), then the tails of every row (tail_bytes each)
//   tail  = state floats, score (float64), flags and stamp (uint32), other facts (fact_bytes)
//
// Facts are the columns that policies declare; kernels know only the score, and give the others at a birth what the
// store says. All parts of a tail begin at multiples of 4 bytes. Weights lie apart from the rest because a lookup reads
// nothing else; score and flags lie with the state because an update writes that cache line anyway. Keys lie elsewhere,
// and only where changes are listed by slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/cpu.h"

namespace shoal {

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2 };

static constexpr uint32_t kNoSlot = 0xffffffffu;

enum Flag : uint32_t {
  kChanged = 1,  // since the last seal
  kDirty = 2,    // differs from the tier below
  kErased = 4,   // its key is gone; the slot waits for a lease to end
};

// When a row was used last, by a clock of its table, in the bits above the flags: an update writes these anyway.
static constexpr uint32_t kStampShift = 8;
static constexpr uint32_t kFlagBits = (1u << kStampShift) - 1;
inline uint32_t stamped(uint32_t flags, uint32_t clock) { return (flags & kFlagBits) | clock << kStampShift; }
// How long ago that was. The clock comes round after 2^24 ticks.
inline uint32_t age_of(uint32_t flags, uint32_t clock) {
  return (clock - (flags >> kStampShift)) & (~0u >> kStampShift);
}

struct Rows {
  char* const* slabs = nullptr;
  uint32_t slab_count = 0;
  uint32_t slot_bits = 0;
  uint32_t rows_per_slab = 0;
  int32_t dim = 0;
  Dtype dtype = Dtype::f32;
  int32_t state_floats = 0;
  int64_t weight_bytes = 0;
  int64_t tail_bytes = 0;
  int64_t tails_at = 0;            // where the tails begin in a slab
  int64_t* const* keys = nullptr;  // the key of every row, by slab; null if they are not kept
  // Last, since an update reads none of them: in the middle they made a step 3 % slower.
  int32_t fact_bytes = 0;             // of the facts other than the score
  const char* first_facts = nullptr;  // [fact_bytes], as rows are born; the store's

  SHOAL_INLINE char* weights(uint32_t slot) const {
    return slabs[slot >> slot_bits] + static_cast<int64_t>(slot & ((1u << slot_bits) - 1)) * weight_bytes;
  }
  SHOAL_INLINE char* tail(uint32_t slot) const {
    return slabs[slot >> slot_bits] + tails_at + static_cast<int64_t>(slot & ((1u << slot_bits) - 1)) * tail_bytes;
  }
  // REQUIRES: keys are kept.
  SHOAL_INLINE int64_t& key(uint32_t slot) const { return keys[slot >> slot_bits][slot & ((1u << slot_bits) - 1)]; }
  SHOAL_INLINE float* state(char* tail) const { return reinterpret_cast<float*>(tail); }
  SHOAL_INLINE double score(const char* tail) const {
    double score;
    std::memcpy(&score, tail + 4 * static_cast<int64_t>(state_floats), sizeof score);
    return score;
  }
  SHOAL_INLINE void set_score(char* tail, double score) const {
    std::memcpy(tail + 4 * static_cast<int64_t>(state_floats), &score, sizeof score);
  }
  SHOAL_INLINE uint32_t& flags(char* tail) const {
    return *reinterpret_cast<uint32_t*>(tail + 4 * static_cast<int64_t>(state_floats) + sizeof(double));
  }
  SHOAL_INLINE char* facts(char* tail) const {
    return tail + 4 * static_cast<int64_t>(state_floats) + sizeof(double) + sizeof(uint32_t);
  }
  void set_first_facts(char* tail) const {
    if (fact_bytes) std::memcpy(facts(tail), first_facts, static_cast<size_t>(fact_bytes));
  }
};

// About how long a thread takes for so many keys, in lines of memory: a row's own, and two for what each key costs.
inline int64_t row_work(const Rows& rows, int64_t keys) { return keys * (2 + (rows.weight_bytes + 63) / 64); }

}  // namespace shoal
