#include "index/find_isa.h"
#include "kernels/pool.h"
#include "kernels/vec.h"
// clang-format off: births use vec.h
#include "kernels/birth_isa.h"
// clang-format on

namespace shoal {
using namespace SHOAL_ISA;
namespace {

// Rows ahead whose lines are asked for. Ten rows of four lines keep the miss buffers of a core full.
constexpr int64_t kAheadLines = 96;

// Inlined by force: the compiler takes a function that only prefetches for one without effect, and may drop its calls.
SHOAL_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) prefetch_far(row + at);
}

inline int64_t rows_ahead(const Rows& rows) {
  int64_t lines = (rows.weight_bytes + 63) / 64;
  int64_t ahead = kAheadLines / lines;
  return ahead < 2 ? 2 : ahead > 32 ? 32 : ahead;
}

// A feature's slots: all known, or found on the way, while rows travel from memory.
class Slots {
 public:
  Slots(const Bags& bags, int64_t slot_list) : slots_(bags.slots_of(slot_list)), known_(INT64_MAX) {}
  // Those that `finder` writes, from position `begin` on. `stops`: once a key has none, no output is wanted.
  Slots(Finder<int64_t>* finder, const uint32_t* slots, int64_t begin, bool stops)
      : slots_(slots), begin_(begin), known_(begin), keys_of_64_(finder), stops_(stops) {}
  Slots(Finder<int32_t>* finder, const uint32_t* slots, int64_t begin, bool stops)
      : slots_(slots), begin_(begin), known_(begin), keys_of_32_(finder), stops_(stops) {}

  SHOAL_INLINE uint32_t operator[](int64_t i) {
    while (i >= known_) find_more();
    return slots_[i];
  }
  bool has_stopped() const { return has_stopped_; }

 private:
  __attribute__((noinline)) void find_more() { keys_of_64_ ? find_more(*keys_of_64_) : find_more(*keys_of_32_); }
  template <typename Key>
  SHOAL_INLINE void find_more(Finder<Key>& finder) {
    finder.advance();
    known_ = begin_ + static_cast<int64_t>(finder.found());
    has_stopped_ = stops_ && finder.missing() > 0;
  }

  const uint32_t* slots_;
  int64_t begin_ = 0;
  int64_t known_;  // up to this position
  Finder<int64_t>* keys_of_64_ = nullptr;
  Finder<int32_t>* keys_of_32_ = nullptr;
  bool stops_ = false;
  bool has_stopped_ = false;
};

// acc[at .. at + 16 * V) += weight x row, over all rows of a piece, in registers.
template <Dtype D, int V, bool Weighted>
inline void add_block(const char* const* row, const float* weight, int64_t n, int32_t at, float* acc) {
  f32x16 sum[V];
  for (int v = 0; v < V; ++v) sum[v] = load16(acc + at + kLanes * v);
  for (int64_t r = 0; r < n; ++r) {
    const auto* p = reinterpret_cast<const typename Element<D>::type*>(row[r]) + at;
    for (int v = 0; v < V; ++v) {
      f32x16 x = load_elements<D>(p + kLanes * v);
      if constexpr (Weighted)
        sum[v] += weight[r] * x;
      else
        sum[v] += x;
    }
  }
  for (int v = 0; v < V; ++v) store16(acc + at + kLanes * v, sum[v]);
}

template <Dtype D, bool Weighted>
void add_rows(const char* const* row, const float* weight, int64_t n, int32_t dim, float* acc) {
  int32_t at = 0;
  for (; at + 8 * kLanes <= dim; at += 8 * kLanes) add_block<D, 8, Weighted>(row, weight, n, at, acc);
  if (at + 4 * kLanes <= dim) add_block<D, 4, Weighted>(row, weight, n, at, acc), at += 4 * kLanes;
  if (at + 2 * kLanes <= dim) add_block<D, 2, Weighted>(row, weight, n, at, acc), at += 2 * kLanes;
  if (at + kLanes <= dim) add_block<D, 1, Weighted>(row, weight, n, at, acc), at += kLanes;
  if (at == dim) return;
  for (int64_t r = 0; r < n; ++r) {
    const auto* p = reinterpret_cast<const typename Element<D>::type*>(row[r]);
    for (int32_t i = at; i < dim; ++i) {
      if constexpr (Weighted)
        acc[i] += weight[r] * Element<D>::load(p[i]);
      else
        acc[i] += Element<D>::load(p[i]);
    }
  }
}

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// The row of position i; a missing one is born into `scratch`.
template <Dtype D>
inline const char* row_at(const PoolFeature& feature, const Bags& bags, Slots& slots, int64_t i, float* born_at,
                          float* scratch) {
  uint32_t slot = slots[i];
  if (slot != kNoSlot) return feature.rows->weights(slot);
  born(feature.missing, bags.key(i), feature.rows->dim, scratch);
  store_nearest<D>(reinterpret_cast<char*>(born_at), feature.rows->dim, scratch);
  return reinterpret_cast<const char*>(born_at);
}

template <Dtype D>
void run_bags(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin, int64_t end,
              float* scratch) {
  const Rows& rows = *feature.rows;
  const int32_t dim = rows.dim;
  const int64_t first = feature.source * bags.batch, ahead = rows_ahead(rows);
  const int64_t last = bags.offset(first + end);
  float* acc = scratch;
  float* wide = scratch + dim;
  float* missing = scratch + 2 * dim;
  for (int64_t i = bags.offset(first + begin), stop = i + ahead < last ? i + ahead : last; i < stop; ++i)
    if (slots[i] != kNoSlot) prefetch_row(rows.weights(slots[i]), rows.weight_bytes);
  for (int64_t bag = begin; bag < end && !slots.has_stopped(); ++bag) {
    int64_t from = bags.offset(first + bag), to = bags.offset(first + bag + 1);
    char* target = feature.out + bag * feature.stride * element_bytes(out_dtype);
    bool direct = out_dtype == Dtype::f32;
    float* sum = direct ? reinterpret_cast<float*>(target) : acc;
    for (int32_t i = 0; i < dim; ++i) sum[i] = 0.0f;
    for (int64_t piece = from; piece < to; piece += kPieceRows) {
      int64_t n = to - piece < kPieceRows ? to - piece : kPieceRows;
      const char* row[kPieceRows];
      for (int64_t r = 0; r < n; ++r) {
        if (piece + r + ahead < last && slots[piece + r + ahead] != kNoSlot)
          prefetch_row(rows.weights(slots[piece + r + ahead]), rows.weight_bytes);
        row[r] = row_at<D>(feature, bags, slots, piece + r, missing + r * dim, wide);
      }
      if (bags.weights)
        add_rows<D, true>(row, bags.weights + piece, n, dim, sum);
      else
        add_rows<D, false>(row, nullptr, n, dim, sum);
    }
    if (feature.pooling == Pooling::mean && to > from) {
      float count = static_cast<float>(to - from);
      for (int32_t i = 0; i < dim; ++i) sum[i] /= count;
    }
    if (!direct) store_nearest(out_dtype, target, dim, sum);
  }
}

// The same for the usual widths, 16 * V: a bag's sum stays in registers, and a row's address is worked out once, when the
// row is asked for.
template <Dtype D, int V, bool Weighted>
void run_wide_bags(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin,
                   int64_t end, float* scratch) {
  constexpr uint64_t kRing = 32;
  constexpr int64_t kRowBytes = sizeof(typename Element<D>::type) * kLanes * V;
  // Copies, which stay in registers: what is written meanwhile might be the originals, for all that a compiler knows.
  char* const* const slabs = feature.rows->slabs;
  const uint32_t slot_bits = feature.rows->slot_bits, in_slab = (1u << slot_bits) - 1;
  const int32_t dim = kLanes * V;
  const int64_t first = feature.source * bags.batch, ahead = rows_ahead(*feature.rows);
  const int64_t start = bags.offset(first + begin), last = bags.offset(first + end);
  float* wide = scratch;
  float* missing = scratch + dim;
  const char* ring[kRing];
  auto ask = [&](int64_t i) __attribute__((always_inline)) {
    const uint32_t slot = slots[i];
    const char* row = nullptr;
    if (slot != kNoSlot) {
      row = slabs[slot >> slot_bits] + static_cast<uint64_t>(slot & in_slab) * kRowBytes;
      prefetch_row(row, kRowBytes);
    }
    ring[static_cast<uint64_t>(i) % kRing] = row;
  };
  for (int64_t i = start; i < start + ahead && i < last; ++i) ask(i);
  for (int64_t bag = begin, i = start; bag < end && !slots.has_stopped(); ++bag) {
    const int64_t from = i, to = bags.offset(first + bag + 1);
    f32x16 sum[V] = {};
    for (; i < to; ++i) {
      const char* row = ring[static_cast<uint64_t>(i) % kRing];
      if (i + ahead < last) ask(i + ahead);
      if (!row) row = row_at<D>(feature, bags, slots, i, missing, wide);
      const auto* p = reinterpret_cast<const typename Element<D>::type*>(row);
      for (int v = 0; v < V; ++v) {
        if constexpr (Weighted)
          sum[v] += bags.weights[i] * load_elements<D>(p + kLanes * v);
        else
          sum[v] += load_elements<D>(p + kLanes * v);
      }
    }
    if (feature.pooling == Pooling::mean && to > from)
      for (int v = 0; v < V; ++v) sum[v] /= static_cast<float>(to - from);
    char* target = feature.out + bag * feature.stride * element_bytes(out_dtype);
    const bool direct = out_dtype == Dtype::f32;
    float* total = direct ? reinterpret_cast<float*>(target) : wide;
    for (int v = 0; v < V; ++v) store16(total + kLanes * v, sum[v]);
    if (!direct) store_nearest(out_dtype, target, dim, wide);
  }
}

template <Dtype D, bool Weighted>
void run_any_bags(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin,
                  int64_t end, float* scratch) {
  switch (feature.rows->dim) {
    case 16: return run_wide_bags<D, 1, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 32: return run_wide_bags<D, 2, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 48: return run_wide_bags<D, 3, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 64: return run_wide_bags<D, 4, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 80: return run_wide_bags<D, 5, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 96: return run_wide_bags<D, 6, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 112: return run_wide_bags<D, 7, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    case 128: return run_wide_bags<D, 8, Weighted>(feature, bags, slots, out_dtype, begin, end, scratch);
    default: return run_bags<D>(feature, bags, slots, out_dtype, begin, end, scratch);
  }
}

template <Dtype D>
void run_keys(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin, int64_t end,
              float* scratch) {
  const Rows& rows = *feature.rows;
  const int32_t dim = rows.dim;
  const int64_t base = bags.offset(feature.source * bags.batch), ahead = rows_ahead(rows);
  float* wide = scratch;
  float* missing = scratch + dim;
  for (int64_t i = begin; i < end && !slots.has_stopped(); ++i) {
    if (i + ahead < end && slots[base + i + ahead] != kNoSlot)
      prefetch_row(rows.weights(slots[base + i + ahead]), rows.weight_bytes);
    const char* row = row_at<D>(feature, bags, slots, base + i, missing, wide);
    char* target = feature.out + i * feature.stride * element_bytes(out_dtype);
    if (D == out_dtype && !bags.weights) {
      std::memcpy(target, row, static_cast<size_t>(rows.weight_bytes));
      continue;
    }
    load_row<D>(row, dim, wide);
    if (bags.weights)
      for (int32_t j = 0; j < dim; ++j) wide[j] *= bags.weights[base + i];
    store_nearest(out_dtype, target, dim, wide);
  }
}

void run_silent(const PoolFeature& feature, Dtype out_dtype, int64_t begin, int64_t end) {
  int64_t bytes = element_bytes(out_dtype);
  for (int64_t i = begin; i < end; ++i)
    std::memset(feature.out + i * feature.stride * bytes, 0, static_cast<size_t>(feature.rows->dim * bytes));
}

template <Dtype D>
void run_typed(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin, int64_t end,
               float* scratch) {
  if (feature.pooling == Pooling::none)
    run_keys<D>(feature, bags, slots, out_dtype, begin, end, scratch);
  else if (bags.weights)
    run_any_bags<D, true>(feature, bags, slots, out_dtype, begin, end, scratch);
  else
    run_any_bags<D, false>(feature, bags, slots, out_dtype, begin, end, scratch);
}

void run_slots(const PoolFeature& feature, const Bags& bags, Slots& slots, Dtype out_dtype, int64_t begin, int64_t end,
               float* scratch) {
  switch (feature.rows->dtype) {
    case Dtype::f32: return run_typed<Dtype::f32>(feature, bags, slots, out_dtype, begin, end, scratch);
    case Dtype::f16: return run_typed<Dtype::f16>(feature, bags, slots, out_dtype, begin, end, scratch);
    case Dtype::bf16: return run_typed<Dtype::bf16>(feature, bags, slots, out_dtype, begin, end, scratch);
  }
}

void run(const PoolFeature& feature, const Bags& bags, Dtype out_dtype, int64_t begin, int64_t end, float* scratch) {
  if (feature.silent) return run_silent(feature, out_dtype, begin, end);
  Slots slots(bags, feature.slot_list);
  run_slots(feature, bags, slots, out_dtype, begin, end, scratch);
}

template <typename Key>
size_t find_and_run_keys(const PoolTask& task, const Bags& bags, const FindTask& find, Dtype out_dtype,
                         float* scratch) {
  const PoolFeature& feature = *task.feature;
  const size_t n = static_cast<size_t>(find.end - find.begin);
  Finder<Key> finder(find.index, static_cast<const Key*>(bags.keys) + find.begin, n, find.slots + find.begin);
  Slots slots(&finder, find.slots, find.begin, find.stops);
  if (feature.silent)
    run_silent(feature, out_dtype, task.begin, task.end);
  else
    run_slots(feature, bags, slots, out_dtype, task.begin, task.end, scratch);
  while (finder.found() < n) finder.advance();
  return finder.missing();
}

size_t find_and_run(const PoolTask& task, const Bags& bags, const FindTask& find, Dtype out_dtype, float* scratch) {
  return bags.narrow_keys ? find_and_run_keys<int32_t>(task, bags, find, out_dtype, scratch)
                          : find_and_run_keys<int64_t>(task, bags, find, out_dtype, scratch);
}

}  // namespace

extern const PoolKernel SHOAL_ISA_TABLE(pool_kernel);
const PoolKernel SHOAL_ISA_TABLE(pool_kernel) = {run, find_and_run};

}  // namespace shoal
