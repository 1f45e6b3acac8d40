#include "kernels/update.h"

#include "kernels/vec.h"
// clang-format off: what follows uses vec.h
#include "kernels/birth_isa.h"
#include "kernels/optim/adagrad.h"
#include "kernels/optim/adam.h"
#include "kernels/optim/assign.h"
#include "kernels/optim/ftrl.h"
#include "kernels/optim/momentum.h"
#include "kernels/optim/partial_rowwise_adam.h"
#include "kernels/optim/rowwise_adagrad.h"
#include "kernels/optim/sgd.h"
#include "kernels/rounding_isa.h"
// clang-format on

namespace shoal {
using namespace SHOAL_ISA;
namespace {

// Pairs ahead whose row is asked for, weights and tail.
constexpr int64_t kAhead = 16;

// Inlined by force: the compiler takes a function that only prefetches for one without effect, and drops its calls.
SHOAL_INLINE void prefetch_row(const Rows& rows, uint64_t pair) {
  const uint32_t slot = static_cast<uint32_t>(pair >> 32);
  const char* weights = rows.weights(slot);
  for (int64_t at = 0; at < rows.weight_bytes; at += 64) __builtin_prefetch(weights + at);
  const char* tail = rows.tail(slot);
  for (int64_t at = 0; at < rows.tail_bytes; at += 64) __builtin_prefetch(tail + at);
}

bool finite(const float* data, int64_t n) {
  // x - x is 0 for every finite x and NaN for the rest; sixteen sums vectorise without a branch.
  f32x16 sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f32x16 x = load16(data + i);
    sum += x - x;
  }
  for (; i < n; ++i) sum[0] += data[i] - data[i];
  return fold(sum) == 0.0f;
}

struct Gradient {
  const float* row;
  float scale;
};

// The output gradient that reaches a position, and the factor with which it does.
inline Gradient gradient_at(const UpdatePart& part, const Bags& bags, int64_t position) {
  const GradientRow* in = part.features;
  while (position < in->begin || position >= in->end) ++in;
  const UpdateFeature& feature = *in->feature;
  float scale = part.table->grad_scale;
  if (bags.weights) scale *= bags.weights[position];
  if (feature.pooling == Pooling::none) return {feature.grad + (position - in->begin) * feature.stride, scale};
  int64_t bag = part.bag_of[position];
  if (feature.pooling == Pooling::mean) {
    int64_t at = feature.source * bags.batch + bag;
    scale /= static_cast<float>(bags.offset(at + 1) - bags.offset(at));
  }
  return {feature.grad + bag * feature.stride, scale};
}

// The gradient of the row whose pairs are [begin, end): added up in order of position.
inline const float* reduce(const UpdatePart& part, const Bags& bags, const uint64_t* begin, const uint64_t* end,
                           float* sum) {
  const int32_t dim = part.table->rows->dim;
  const Reduce how = part.table->reduce;
  if (how == Reduce::first) end = begin + 1;
  if (how == Reduce::last) begin = end - 1;
  Gradient first = gradient_at(part, bags, static_cast<uint32_t>(*begin));
  if (end - begin == 1) {
    if (first.scale == 1.0f) return first.row;
    for (int32_t i = 0; i < dim; ++i) sum[i] = first.scale * first.row[i];
    return sum;
  }
  for (int32_t i = 0; i < dim; ++i) sum[i] = first.scale * first.row[i];
  for (const uint64_t* pair = begin + 1; pair < end; ++pair) {
    Gradient next = gradient_at(part, bags, static_cast<uint32_t>(*pair));
    for (int32_t i = 0; i < dim; ++i) sum[i] += next.scale * next.row[i];
  }
  if (how == Reduce::mean) {
    const float count = static_cast<float>(end - begin);
    for (int32_t i = 0; i < dim; ++i) sum[i] /= count;
  }
  return sum;
}

inline const float* regularise(const UpdateTable& table, const float* g, const float* w, float* own) {
  const int32_t dim = table.rows->dim;
  if (table.clip_value > 0) {
    const float top = table.clip_value;
    for (int32_t i = 0; i < dim; ++i) own[i] = g[i] > top ? top : g[i] < -top ? -top : g[i];
    g = own;
  }
  if (table.clip_norm > 0) {
    const float norm = __builtin_sqrtf(sum_squares(g, dim));
    if (norm > table.clip_norm) {
      const float factor = table.clip_norm / norm;
      for (int32_t i = 0; i < dim; ++i) own[i] = g[i] * factor;
      g = own;
    }
  }
  if (table.weight_decay > 0) {
    for (int32_t i = 0; i < dim; ++i) own[i] = g[i] + table.weight_decay * w[i];
    g = own;
  }
  return g;
}

template <typename Step>
UpdateCounts run(const UpdatePart& part, const Bags& bags, const uint64_t* pairs, int64_t n, float* scratch) {
  const UpdateTable& table = *part.table;
  const Rows& rows = *table.rows;
  const int32_t dim = rows.dim;
  float* sum = scratch;
  float* wide = scratch + dim;
  UpdateCounts counts;
  for (int64_t i = 0; i < kAhead && i < n; ++i) prefetch_row(rows, pairs[i]);
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const uint32_t slot = static_cast<uint32_t>(pairs[begin] >> 32);
    for (end = begin; end < n && pairs[end] >> 32 == slot; ++end)
      if (end + kAhead < n) prefetch_row(rows, pairs[end + kAhead]);
    char* tail = rows.tail(slot);
    if (rows.flags(tail) & kErased) {
      ++counts.dropped;
      continue;
    }
    const float* g = reduce(part, bags, pairs + begin, pairs + end, sum);
    if (end - begin > 1 && !finite(g, dim)) {
      ++counts.nonfinite;
      continue;
    }
    char* stored = rows.weights(slot);
    float* w = reinterpret_cast<float*>(stored);
    if (rows.dtype != Dtype::f32) {
      w = wide;
      load_row(rows.dtype, stored, dim, w);
    }
    g = regularise(table, g, w, sum);
    if (table.shrink != 1.0f)
      for (int32_t i = 0; i < dim; ++i) w[i] *= table.shrink;
    Step::step(w, g, rows.state(tail), dim, table.hyper);
    if (table.max_norm > 0) {
      const float norm = __builtin_sqrtf(sum_squares(w, dim));
      if (norm > table.max_norm)
        for (int32_t i = 0; i < dim; ++i) w[i] *= table.max_norm / norm;
    }
    if (rows.dtype != Dtype::f32)
      store_stochastic(rows.dtype, stored, dim, w, table.rounding_stream,
                       bags.key(static_cast<uint32_t>(pairs[begin])), table.step);
    if (rows.score(tail) < table.score) rows.set_score(tail, table.score);
    rows.flags(tail) |= kChanged | kDirty;
    ++counts.rows;
  }
  return counts;
}

UpdateCounts run_any(const UpdatePart& part, const Bags& bags, const uint64_t* pairs, int64_t n, float* scratch) {
  switch (part.table->optimizer) {
    case Optimizer::sgd: return run<Sgd>(part, bags, pairs, n, scratch);
    case Optimizer::momentum: return run<Momentum>(part, bags, pairs, n, scratch);
    case Optimizer::adagrad: return run<Adagrad>(part, bags, pairs, n, scratch);
    case Optimizer::rowwise_adagrad: return run<RowwiseAdagrad>(part, bags, pairs, n, scratch);
    case Optimizer::adam: return run<Adam>(part, bags, pairs, n, scratch);
    case Optimizer::partial_rowwise_adam: return run<PartialRowwiseAdam>(part, bags, pairs, n, scratch);
    case Optimizer::ftrl: return run<Ftrl>(part, bags, pairs, n, scratch);
    case Optimizer::assign: return run<Assign>(part, bags, pairs, n, scratch);
  }
  return {};
}

void position_gradients(const UpdateFeature& feature, const Rows& rows, const Init& missing, const Bags& bags,
                      int64_t begin, int64_t end, float* out, float* scratch) {
  const int64_t first = feature.source * bags.batch, base = bags.offset(first);
  for (int64_t bag = begin; bag < end; ++bag) {
    int64_t from = bags.offset(first + bag), to = bags.offset(first + bag + 1);
    for (int64_t i = from; i < to; ++i) {
      if (bags.slots[i] != kNoSlot)
        load_row(rows.dtype, rows.weights(bags.slots[i]), rows.dim, scratch);
      else {
        born(missing, bags.key(i), rows.dim, scratch);
        // As it would read: rounded to the rows' dtype.
        store_nearest(rows.dtype, reinterpret_cast<char*>(scratch + rows.dim), rows.dim, scratch);
        load_row(rows.dtype, reinterpret_cast<char*>(scratch + rows.dim), rows.dim, scratch);
      }
      int64_t at = feature.pooling == Pooling::none ? i - base : bag;
      float gradient = dot(feature.grad + at * feature.stride, scratch, rows.dim);
      out[i] = feature.pooling == Pooling::mean ? gradient / static_cast<float>(to - from) : gradient;
    }
  }
}

}  // namespace

extern const UpdateKernel SHOAL_ISA_TABLE(update_kernel);
const UpdateKernel SHOAL_ISA_TABLE(update_kernel) = {run_any, position_gradients, finite};

}  // namespace shoal
