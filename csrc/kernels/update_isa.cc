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

// Pairs ahead whose row (weights and tail) and gradient are asked for.
constexpr int64_t kAhead = 24;

// The most that a row's squared gradient may be. Not the largest float: sums of squares, moments and steps that follow
// from it must stay finite for many steps, too.
constexpr float kMostSquares = 1e30f;
constexpr float kLargest = 3.4028234663852886e38f;

bool finite(const float* data, int64_t n) {
  // x - x is 0 for every finite x and NaN for the rest; sixteen sums vectorise without a branch.
  f32x16 sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f32x16 x = load16(data + i);
    sum += x - x;
  }
  float rest = 0.0f;
  for (int lane = 0; lane < kLanes && i < n; ++lane, ++i) rest += data[i] - data[i];
  return fold(sum) + rest == 0.0f;
}

struct Gradient {
  const float* row;
  float scale;
};

// The output gradient that a pair stands for, and the factor with which it reaches the row.
SHOAL_INLINE Gradient gradient_of(const UpdatePart& part, const Bags& bags, uint32_t low) {
  const GradientRow* in = part.features;
  if (part.direct) return {in->feature->grad + static_cast<int64_t>(low) * in->feature->stride, part.table->grad_scale};
  const int64_t position = low;
  while (position < in->begin || position >= in->end) ++in;
  const UpdateFeature& feature = *in->feature;
  float scale = part.table->grad_scale;
  if (bags.weights) scale *= bags.weights[position];
  if (feature.pooling == Pooling::none) return {feature.grad + (position - in->begin) * feature.stride, scale};
  int64_t bag = part.bag_of[feature.slot_list * bags.count + position];
  if (feature.pooling == Pooling::mean) {
    int64_t at = feature.source * bags.batch + bag;
    scale /= static_cast<float>(bags.offset(at + 1) - bags.offset(at));
  }
  return {feature.grad + bag * feature.stride, scale};
}

// Asks for a row that is to be changed: its weights and its tail. Inlined by force: the compiler takes a function that only
// prefetches for one without effect, and may drop its calls.
template <int Dim>
SHOAL_INLINE void ask_row(const Rows& rows, uint32_t slot) {
  const int64_t bytes = Dim ? 4 * Dim : rows.weight_bytes;
  const char* weights = rows.weights(slot);
  for (int64_t at = 0; at < bytes; at += 64) prefetch_far(weights + at);
  const char* tail = rows.tail(slot);
  for (int64_t at = 0; at < rows.tail_bytes; at += 64) prefetch_far(tail + at);
}

// The sorted pairs of a part, with what the next ones need on its way from memory. Dim: of float32 rows, where it is
// known to the compiler; 0 for any row.
template <int Dim>
class Pairs {
 public:
  SHOAL_INLINE Pairs(const UpdatePart& part, const Bags& bags, const uint64_t* pairs, int64_t n)
      : part_(part), bags_(bags), pairs_(pairs), n_(n) {
    for (int64_t i = 0; i < kAhead && i < n; ++i) ask(i);
  }

  SHOAL_INLINE uint32_t slot(int64_t i) const { return static_cast<uint32_t>(pairs_[i] >> 32); }
  SHOAL_INLINE uint32_t low(int64_t i) const { return static_cast<uint32_t>(pairs_[i]); }
  // REQUIRES: called once for each i, in order.
  SHOAL_INLINE Gradient next(int64_t i) {
    Gradient here = ring_[i % kAhead];
    if (i + kAhead < n_) ask(i + kAhead);
    return here;
  }

 private:
  SHOAL_INLINE void ask(int64_t i) {
    const Rows& rows = *part_.table->rows;
    if (i == 0 || slot(i) != slot(i - 1)) ask_row<Dim>(rows, slot(i));
    Gradient gradient = gradient_of(part_, bags_, low(i));
    const int32_t dim = Dim ? Dim : rows.dim;
    for (int32_t at = 0; at < dim; at += 16) __builtin_prefetch(gradient.row + at);
    ring_[i % kAhead] = gradient;
  }

  const UpdatePart& part_;
  const Bags& bags_;
  const uint64_t* pairs_;
  const int64_t n_;
  Gradient ring_[kAhead];
};

struct Segment {
  const float* gradient;  // of the row, reduced in order of position; null if none reached it that counts
  int64_t end;            // the first pair of the next row
};

// The sum of the gradients of one row, in order. Where the width is known, it stays in registers.
template <int Dim>
SHOAL_INLINE int64_t add_up(Pairs<Dim>& pairs, Gradient gradient, int64_t at, int64_t n, int32_t dim, float* sum) {
  const uint32_t slot = pairs.slot(at++);
  if constexpr (Dim > 0) {
    f32x16 total[Dim / kLanes];
    for (int v = 0; v < Dim / kLanes; ++v) total[v] = gradient.scale * load16(gradient.row + kLanes * v);
    for (; at < n && pairs.slot(at) == slot; ++at) {
      gradient = pairs.next(at);
      for (int v = 0; v < Dim / kLanes; ++v) total[v] += gradient.scale * load16(gradient.row + kLanes * v);
    }
    for (int v = 0; v < Dim / kLanes; ++v) store16(sum + kLanes * v, total[v]);
  } else {
    for (int32_t i = 0; i < dim; ++i) sum[i] = gradient.scale * gradient.row[i];
    for (; at < n && pairs.slot(at) == slot; ++at) {
      gradient = pairs.next(at);
      for (int32_t i = 0; i < dim; ++i) sum[i] += gradient.scale * gradient.row[i];
    }
  }
  return at;
}

// Whether any element of a gradient is other than zero when it reaches the row.
inline bool is_touched(const Gradient& gradient, int32_t dim) {
  bool touched = false;
  for (int32_t i = 0; i < dim; ++i) touched |= gradient.scale * gradient.row[i] != 0.0f;
  return touched;
}

// The first, last or mean of the gradients that are not all zeros.
template <int Dim>
Segment reduce_touched(Pairs<Dim>& pairs, int64_t at, int64_t n, Reduce how, int32_t dim, float* sum) {
  const uint32_t slot = pairs.slot(at);
  Gradient chosen = {nullptr, 1.0f};
  int64_t touched = 0;
  for (; at < n && pairs.slot(at) == slot; ++at) {
    const Gradient gradient = pairs.next(at);
    if ((how == Reduce::first && touched) || !is_touched(gradient, dim)) continue;
    ++touched;
    if (how != Reduce::mean)
      chosen = gradient;
    else if (touched == 1)
      for (int32_t i = 0; i < dim; ++i) sum[i] = gradient.scale * gradient.row[i];
    else
      for (int32_t i = 0; i < dim; ++i) sum[i] += gradient.scale * gradient.row[i];
  }
  if (!touched) return {nullptr, at};
  if (how == Reduce::mean) {
    const float count = static_cast<float>(touched);
    for (int32_t i = 0; i < dim; ++i) sum[i] /= count;
    return {sum, at};
  }
  if (chosen.scale == 1.0f) return {chosen.row, at};
  for (int32_t i = 0; i < dim; ++i) sum[i] = chosen.scale * chosen.row[i];
  return {sum, at};
}

template <int Dim>
SHOAL_INLINE Segment reduce(Pairs<Dim>& pairs, int64_t begin, int64_t n, Reduce how, int32_t dim, float* sum) {
  if (how != Reduce::sum) return reduce_touched<Dim>(pairs, begin, n, how, dim, sum);
  const Gradient gradient = pairs.next(begin);
  const bool alone = begin + 1 == n || pairs.slot(begin + 1) != pairs.slot(begin);
  if (!alone) return {sum, add_up<Dim>(pairs, gradient, begin, n, dim, sum)};
  if (gradient.scale == 1.0f) return {gradient.row, begin + 1};
  for (int32_t i = 0; i < dim; ++i) sum[i] = gradient.scale * gradient.row[i];
  return {sum, begin + 1};
}

// The factor that brings a row down to an L2 norm, or 1 if it is not above it; also where its squares overflow.
inline float factor_to(float norm, const float* row, int32_t dim) {
  const float squares = sum_squares(row, dim);
  if (squares <= kLargest) {
    const float now = __builtin_sqrtf(squares);
    return now > norm ? norm / now : 1.0f;
  }
  float largest = 0.0f, scaled = 0.0f;
  for (int32_t i = 0; i < dim; ++i) largest = __builtin_fmaxf(largest, __builtin_fabsf(row[i]));
  for (int32_t i = 0; i < dim; ++i) scaled += row[i] / largest * (row[i] / largest);
  const float factor = norm / largest / __builtin_sqrtf(scaled);
  return factor < 1.0f ? factor : 1.0f;
}

inline const float* regularise(const UpdateTable& table, const float* g, const float* w, float* own) {
  const int32_t dim = table.rows->dim;
  if (table.clip_value > 0) {
    const float top = table.clip_value;
    for (int32_t i = 0; i < dim; ++i) own[i] = g[i] > top ? top : g[i] < -top ? -top : g[i];
    g = own;
  }
  if (table.clip_norm > 0) {
    const float factor = factor_to(table.clip_norm, g, dim);
    if (factor < 1.0f) {
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

// What a gradient does to its row.
template <typename Step, int Dim>
class RowStep {
 public:
  SHOAL_INLINE RowStep(const UpdatePart& part, const Bags& bags, float* scratch)
      : part_(part),
        bags_(bags),
        table_(*part.table),
        rows_(*part.table->rows),
        clips_(table_.clip_value > 0 || table_.clip_norm > 0),
        own_(scratch),
        wide_(scratch + dim()),
        changed_(part.changed) {}

  SHOAL_INLINE int32_t dim() const { return Dim ? Dim : rows_.dim; }
  UpdateCounts counts() const {
    UpdateCounts counts = counts_;
    counts.changed = changed_ - part_.changed;
    return counts;
  }
  // `g`: the row's gradient, reduced, or null if none reached it that counts; position(): one of those that named the row.
  template <typename Position>
  SHOAL_INLINE void take(uint32_t slot, const float* g, const Position& position) {
    const int32_t dim = this->dim();
    char* tail = rows_.tail(slot);
    if (!g) {  // a use of the row, and no more
      rows_.flags(tail) = stamped(rows_.flags(tail), table_.clock);
      return;
    }
    if (rows_.flags(tail) & kErased) {
      ++counts_.dropped;
      return;
    }
    if (clips_ && !finite(g, dim)) {
      ++counts_.nonfinite;
      return;
    }
    const bool is_f32 = Dim || rows_.dtype == Dtype::f32;
    char* stored = rows_.weights(slot);
    float* w = reinterpret_cast<float*>(stored);
    if (!is_f32) {
      w = wide_;
      load_row(rows_.dtype, stored, dim, w);
    }
    g = regularise(table_, g, w, own_);
    // Its square too: Adagrad and Adam keep it.
    const float squares = sum_squares(g, dim);
    if (!(squares <= kMostSquares)) {
      ++counts_.nonfinite;
      return;
    }
    if (table_.shrink != 1.0f)
      for (int32_t i = 0; i < dim; ++i) w[i] *= table_.shrink;
    Step::step(w, g, squares, rows_.state(tail), dim, table_.hyper);
    if (table_.max_norm > 0) {
      const float factor = factor_to(table_.max_norm, w, dim);
      if (factor < 1.0f)
        for (int32_t i = 0; i < dim; ++i) w[i] *= factor;
    }
    if (!is_f32)
      store_stochastic(rows_.dtype, stored, dim, w, table_.rounding_stream, bags_.key(position()), table_.step);
    if (rows_.score(tail) < table_.score) rows_.set_score(tail, table_.score);
    const uint32_t flags = rows_.flags(tail);
    if (changed_) {  // without a branch on the flag: in a row of batches it is set for any part of the rows
      *changed_ = slot;
      changed_ += (flags & kChanged) == 0;
    }
    rows_.flags(tail) = stamped(flags | kChanged | kDirty, table_.clock);
    ++counts_.rows;
  }

 private:
  const UpdatePart& part_;
  const Bags& bags_;
  const UpdateTable& table_;
  const Rows& rows_;
  const bool clips_;
  float* own_;   // a gradient that is clipped or decayed
  float* wide_;  // a row of 16 bits, as floats
  uint32_t* changed_;
  UpdateCounts counts_;
};

template <typename Step, int Dim>
UpdateCounts run_sorted(const UpdatePart& part, const Bags& bags, const uint64_t* sorted, int64_t n, float* scratch) {
  RowStep<Step, Dim> step(part, bags, scratch);
  Pairs<Dim> pairs(part, bags, sorted, n);
  for (int64_t begin = 0; begin < n;) {
    const int64_t at = begin;
    const Segment segment = reduce<Dim>(pairs, at, n, part.table->reduce, step.dim(), scratch);
    begin = segment.end;
    step.take(pairs.slot(at), segment.gradient, [&] { return pairs.low(at); });
  }
  return step.counts();
}

template <typename Step, int Dim>
UpdateCounts run_summed(const UpdatePart& part, const Bags& bags, const UpdateRows& summed, float* scratch) {
  RowStep<Step, Dim> step(part, bags, scratch);
  for (int64_t i = 0; i < kAhead && i < summed.count; ++i) ask_row<Dim>(*part.table->rows, summed.slot(i));
  for (int64_t i = 0; i < summed.count; ++i) {
    if (i + kAhead < summed.count) {
      ask_row<Dim>(*part.table->rows, summed.slot(i + kAhead));
      const float* sum = summed.sum(i + kAhead, step.dim());
      for (int32_t at = 0; at < step.dim(); at += 16) __builtin_prefetch(sum + at);
    }
    step.take(summed.slot(i), summed.sum(i, step.dim()), [&] { return summed.position(i); });
  }
  return step.counts();
}

// The usual widths are compiled as constants: loops without a remainder, and a third fewer instructions a row.
template <typename Step>
UpdateCounts run_width(const UpdatePart& part, const Bags& bags, const UpdateRows& given, float* scratch) {
  auto run = [&]<int Dim>() {
    return given.sorted ? run_sorted<Step, Dim>(part, bags, given.sorted, given.count, scratch)
                        : run_summed<Step, Dim>(part, bags, given, scratch);
  };
  const Rows& rows = *part.table->rows;
  switch (rows.dtype == Dtype::f32 ? rows.dim : 0) {
    case 16: return run.template operator()<16>();
    case 32: return run.template operator()<32>();
    case 48: return run.template operator()<48>();
    case 64: return run.template operator()<64>();
    case 96: return run.template operator()<96>();
    case 128: return run.template operator()<128>();
    default: return run.template operator()<0>();
  }
}

UpdateCounts run_any(const UpdatePart& part, const Bags& bags, const UpdateRows& given, float* scratch) {
  switch (part.table->optimizer) {
    case Optimizer::sgd: return run_width<Sgd>(part, bags, given, scratch);
    case Optimizer::momentum: return run_width<Momentum>(part, bags, given, scratch);
    case Optimizer::adagrad: return run_width<Adagrad>(part, bags, given, scratch);
    case Optimizer::rowwise_adagrad: return run_width<RowwiseAdagrad>(part, bags, given, scratch);
    case Optimizer::adam: return run_width<Adam>(part, bags, given, scratch);
    case Optimizer::partial_rowwise_adam: return run_width<PartialRowwiseAdam>(part, bags, given, scratch);
    case Optimizer::ftrl: return run_width<Ftrl>(part, bags, given, scratch);
    case Optimizer::assign: return run_width<Assign>(part, bags, given, scratch);
  }
  return {};
}

void position_gradients(const UpdateFeature& feature, const Rows& rows, const Init& missing, const Bags& bags,
                        int64_t begin, int64_t end, float* out, float* scratch) {
  const int64_t first = feature.source * bags.batch, base = bags.offset(first);
  const uint32_t* slots = bags.slots_of(feature.slot_list);
  for (int64_t bag = begin; bag < end; ++bag) {
    int64_t from = bags.offset(first + bag), to = bags.offset(first + bag + 1);
    for (int64_t i = from; i < to; ++i) {
      if (slots[i] != kNoSlot)
        load_row(rows.dtype, rows.weights(slots[i]), rows.dim, scratch);
      else {
        born(missing, bags.key(i), rows.dim, scratch);
        // As it would read: rounded to the rows' dtype.
        store_nearest(rows.dtype, reinterpret_cast<char*>(scratch + rows.dim), rows.dim, scratch);
        load_row(rows.dtype, reinterpret_cast<char*>(scratch + rows.dim), rows.dim, scratch);
      }
      int64_t at = feature.pooling == Pooling::none ? i - base : bag;
      float gradient = dot(feature.grad + at * feature.stride, scratch, rows.dim);
      out[i] += feature.pooling == Pooling::mean ? gradient / static_cast<float>(to - from) : gradient;
    }
  }
}

}  // namespace

extern const UpdateKernel SHOAL_ISA_TABLE(update_kernel);
const UpdateKernel SHOAL_ISA_TABLE(update_kernel) = {run_any, position_gradients, finite};

}  // namespace shoal
