// Backward: gradients of outputs to gradients of rows, and the optimizer's step in place.
//
// A table is split by slot into parts, if threads want them. A part is walked by one thread, which adds a row's gradients up in
// the order of their positions: either from (slot, position) pairs, sorted, or, where rows come again, without a sort
// (sums.h). So the result depends neither on the number of threads nor on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "base/cpu.h"
#include "base/rows.h"
#include "kernels/batch.h"
#include "kernels/changed.h"
#include "kernels/pool.h"

namespace shoal {

// Values are fixed: Python names optimizers by them.
enum class Optimizer : int {
  sgd = 0,
  momentum = 1,
  adagrad = 2,
  rowwise_adagrad = 3,
  adam = 4,
  partial_rowwise_adam = 5,
  ftrl = 6,
  assign = 7,
};

// How the gradients of one row become one. All but the sum use only gradients that are not all zeros; a row without
// such a gradient stays as it is.
enum class Reduce : int { sum = 0, mean = 1, first = 2, last = 3 };

// What a step reads. Each optimizer's file says which of the numbered settings it uses.
struct Hyper {
  float lr = 0;
  double setting[6] = {};  // 1 - 0.999 has four digits less in float
};

// What a table remembers of its backwards.
struct Backwards {
  uint64_t step = 0;  // the table's: it may have been loaded
  int64_t applied = 0;
  int64_t dropped = 0;  // gradients of erased rows
  int64_t skipped = 0;  // rows whose gradients overflowed
};

struct UpdateTable {
  const Rows* rows = nullptr;
  Optimizer optimizer = Optimizer::sgd;
  Reduce reduce = Reduce::sum;
  Hyper hyper;
  float weight_decay = 0;  // added to the gradient
  float shrink = 1;        // decoupled decay: the row is multiplied by it before the step
  float clip_value = 0;    // 0: off
  float clip_norm = 0;
  float max_norm = 0;
  float grad_scale = 1;
  double score = 0;
  uint32_t clock = 0;
  uint64_t step = 0;
  uint64_t rounding_stream = 0;
  ChangedRows* changed = nullptr;  // gets the rows that were not flagged so; null if changes are not tracked
};

// The gradient of one feature's output, and where its rows lie.
struct UpdateFeature {
  int64_t table = 0;
  int64_t source = 0;
  Pooling pooling = Pooling::sum;
  const float* grad = nullptr;  // row i at grad + i * stride
  int64_t stride = 0;
  int64_t slot_list = 0;  // the number of this table's slot list: a feature has one for each table that it feeds
};

struct UpdateCounts {
  int64_t rows = 0;       // rows changed
  int64_t dropped = 0;    // rows erased since the forward: their gradient goes nowhere
  int64_t nonfinite = 0;  // rows left alone because their gradients, added up, are too large to square
  int64_t changed = 0;    // rows that were not flagged changed before
};

// What happened to each table. Throws std::bad_alloc before any row changes.
// REQUIRES: exclusive access to the tables; slots[i] was found for key i.
std::vector<UpdateCounts> update(const std::vector<UpdateTable>& tables, const std::vector<UpdateFeature>& features,
                                 const Bags& bags, int threads);

// Adds d loss / d weight of every position of the features: its output gradient times its row. `rows` and `missing` go by
// feature; UpdateFeature::table is not read.
void weight_gradients(const std::vector<const Rows*>& rows, const std::vector<UpdateFeature>& features,
                      const std::vector<Init>& missing, const Bags& bags, float* out, int threads);

// True if [rows, columns] floats at `stride` hold neither NaN nor infinity.
bool all_finite(const float* data, int64_t rows, int64_t columns, int64_t stride, int threads);

// A feature that reads a table, and its stretch of the batch.
struct GradientRow {
  const UpdateFeature* feature;
  int64_t begin, end;  // positions of the feature in the batch
};

struct UpdatePart {
  const UpdateTable* table;
  const GradientRow* features;  // of this table
  int64_t feature_count;
  // Where a pair's lower half is the number of a row of the only feature's gradient. Else it is a position of the batch.
  bool direct;
  const uint32_t* bag_of;  // [slot lists, n]: the bag a position belongs to; not for direct parts
  // The slots of rows that were not flagged changed; null if changes are not tracked. It may share the memory of the
  // pairs: fewer slots are written than pairs were read.
  uint32_t* changed;
};

// What a part's rows get: either pairs, whose gradients are added up on the way, or sums that were added up before.
struct UpdateRows {
  const uint64_t* sorted;           // slot << 32 | position (see UpdatePart::direct), sorted; null where there are sums
  int64_t count;                    // of pairs, or of sums
  const uint64_t* rows = nullptr;   // slot << 32 | number of the sum
  const float* sums = nullptr;      // [count, dim], by number
  const uint32_t* first = nullptr;  // by number: a position that named the row

  SHOAL_INLINE uint32_t slot(int64_t i) const { return static_cast<uint32_t>(rows[i] >> 32); }
  SHOAL_INLINE const float* sum(int64_t i, int32_t dim) const {
    return sums + static_cast<int64_t>(static_cast<uint32_t>(rows[i])) * dim;
  }
  SHOAL_INLINE uint32_t position(int64_t i) const { return first[static_cast<uint32_t>(rows[i])]; }
};

struct UpdateKernel {
  // `scratch` holds update_scratch_floats(dim) floats.
  UpdateCounts (*run)(const UpdatePart& part, const Bags& bags, const UpdateRows& rows, float* scratch);
  void (*weight_gradients)(const UpdateFeature& feature, const Rows& rows, const Init& missing, const Bags& bags,
                           int64_t begin, int64_t end, float* out, float* scratch);
  bool (*all_finite)(const float* data, int64_t n);
};
SHOAL_DISPATCH(UpdateKernel, update_kernel)

inline int64_t update_scratch_floats(int32_t dim) { return 2 * static_cast<int64_t>(dim); }

}  // namespace shoal
