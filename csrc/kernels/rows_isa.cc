#include "kernels/rows_io.h"
#include "kernels/vec.h"
// clang-format off: births use vec.h
#include "kernels/birth_isa.h"
// clang-format on

namespace shoal {
using namespace SHOAL_ISA;
namespace {

void birth_rows(const Rows& rows, const Init& init, const float* state, const Birth& at, const int64_t* keys,
                const uint32_t* slots, int64_t n, float* scratch) {
  for (int64_t i = 0; i < n; ++i) {
    char* weights = rows.weights(slots[i]);
    if (rows.dtype == Dtype::f32) {
      born(init, keys[i], rows.dim, reinterpret_cast<float*>(weights));
    } else {
      born(init, keys[i], rows.dim, scratch);
      store_nearest(rows.dtype, weights, rows.dim, scratch);
    }
    char* tail = rows.tail(slots[i]);
    for (int32_t j = 0; j < rows.state_floats; ++j) rows.state(tail)[j] = state[j];
    rows.set_score(tail, at.score);
    rows.flags(tail) = stamped(kChanged | kDirty, at.clock);
    rows.set_first_facts(tail);
  }
}

void read_rows(const Rows& rows, const Init& missing, const int64_t* keys, const uint32_t* slots, int64_t n,
               float* out) {
  for (int64_t i = 0; i < n; ++i, out += rows.dim) {
    if (slots[i] != kNoSlot) {
      load_row(rows.dtype, rows.weights(slots[i]), rows.dim, out);
      continue;
    }
    born(missing, keys[i], rows.dim, out);
    // As it would read: rounded to the rows' dtype.
    if (rows.dtype == Dtype::f16)
      for (int32_t j = 0; j < rows.dim; ++j) out[j] = from_f16(to_f16(out[j]));
    if (rows.dtype == Dtype::bf16)
      for (int32_t j = 0; j < rows.dim; ++j) out[j] = from_bf16(to_bf16(out[j]));
  }
}

void write_rows(const Rows& rows, const uint32_t* slots, int64_t n, const float* in) {
  for (int64_t i = 0; i < n; ++i) store_nearest(rows.dtype, rows.weights(slots[i]), rows.dim, in + i * rows.dim);
}

}  // namespace

extern const RowsKernel SHOAL_ISA_TABLE(rows_kernel);
const RowsKernel SHOAL_ISA_TABLE(rows_kernel) = {birth_rows, read_rows, write_rows};

}  // namespace shoal
