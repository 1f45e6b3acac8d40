// Forward: rows to output. One bag gives one output row (sum, mean), or every key gives its own (none).
#pragma once

#include <cstdint>
#include <vector>

#include "base/cpu.h"
#include "base/rows.h"
#include "index/bucket.h"
#include "kernels/batch.h"
#include "kernels/birth.h"

namespace shoal {

enum class Pooling : int { none = 0, sum = 1, mean = 2 };

// How one feature of a batch reads one table.
struct PoolFeature {
  const Rows* rows = nullptr;
  int64_t source = 0;  // the feature's number in the batch: its bags begin at offset source * batch
  Pooling pooling = Pooling::sum;
  bool silent = false;  // the output is zeros (a feature that only writes)
  Init missing;         // what a key without a row reads as
  // Where its output goes: row i of the feature (a bag, or a key for `none`) at out + i * stride, in elements.
  char* out = nullptr;
  int64_t stride = 0;
  int64_t slot_list = 0;  // the number of this table's slot list: a feature has one for each table that it feeds
};

// Output rows [begin, end) of a feature: the work one thread takes at a time.
struct PoolTask {
  const PoolFeature* feature;
  int64_t begin, end;
};
// About as many rows as hide a task's start; the features of a step then split into a few tasks a thread.
inline constexpr int64_t kPoolTaskRows = 2048;

// Appends a feature's tasks; returns the rows they read.
int64_t split_pool(const PoolFeature& feature, const Bags& bags, std::vector<PoolTask>* tasks);
void pool_task(const PoolTask& task, const Bags& bags, Dtype out_dtype);

// Where a task's keys are looked for on the way.
struct FindTask {
  IndexView index;
  int64_t begin, end;  // positions of the task's keys
  uint32_t* slots;     // those of the task's table, of all positions
  // Once a key has no slot the rest of the output is not wanted: what is there is half written, and is pooled again when
  // the keys have rows, or when it is known that none are born.
  bool stops;
};

// As pool_task() for slots that are not found yet. Returns how many keys have none.
int64_t find_and_pool_task(const PoolTask& task, const Bags& bags, const FindTask& find, Dtype out_dtype);

struct PoolKernel {
  // Output rows [begin, end) of a feature. `scratch` holds pool_scratch_floats(dim) floats.
  void (*run)(const PoolFeature& feature, const Bags& bags, Dtype out_dtype, int64_t begin, int64_t end,
              float* scratch);
  // The same, for slots that are not found yet: writes them too. Returns how many keys have none.
  size_t (*find_and_run)(const PoolTask& task, const Bags& bags, const FindTask& find, Dtype out_dtype, float* scratch);
};
SHOAL_DISPATCH(PoolKernel, pool_kernel)

// A bag is summed in pieces of this many rows.
inline constexpr int64_t kPieceRows = 32;
inline int64_t pool_scratch_floats(int32_t dim) { return (kPieceRows + 2) * static_cast<int64_t>(dim); }

}  // namespace shoal
