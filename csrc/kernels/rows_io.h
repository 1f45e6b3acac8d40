// Whole rows in and out of a store: births, reads, writes.
#pragma once

#include <cstdint>
#include <vector>

#include "base/cpu.h"
#include "base/rows.h"
#include "kernels/birth.h"
#include "kernels/changed.h"

namespace shoal {

// When rows are born.
struct Birth {
  double score = 0;
  uint32_t clock = 0;
};

// Writes the rows of new keys: first weights, state as `state` [state_floats], score, stamp and the store's first facts;
// flagged changed and dirty.
void birth(const Rows& rows, const Init& init, const float* state, const Birth& at, const int64_t* keys,
           const uint32_t* slots, int64_t n, int threads);

// out[i] = the weights at slots[i] as floats; a missing one (kNoSlot) is born from keys[i].
void read_weights(const Rows& rows, const Init& missing, const int64_t* keys, const uint32_t* slots, int64_t n,
                  float* out, int threads);
// in[i] to the weights at slots[i], rounded to nearest; flagged changed and dirty.
void write_weights(const Rows& rows, const uint32_t* slots, int64_t n, const float* in);

// Bytes [from, from + bytes) of the tail of each slot: a column. Without a slot (kNoSlot) it reads `missing` [bytes].
void read_column(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t bytes, const char* missing,
                 char* out);
// in[i] to the column of slots[i]; flagged changed and dirty.
void write_column(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t bytes, const char* in);
void set_flags(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t flags);
// The keys of those that are flagged changed; slots may be gone meanwhile. REQUIRES: the rows' keys are kept.
std::vector<int64_t> changed_keys(const Rows& rows, const uint32_t* slots, int64_t n);
void clear_flags(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t flags);

// Whole rows as bytes, one after the other: weights, state, score, other facts. A row below memory is these bytes.
int64_t packed_bytes(const Rows& rows);
void pack(const Rows& rows, const uint32_t* slots, int64_t n, char* out, int threads);
// To slots, where they are clean, and stamped.
void unpack(const Rows& rows, const uint32_t* slots, int64_t n, const char* in, uint32_t clock, int threads);
// Whole rows in columns, as they leave the process: weights [n, weight_bytes], and columns of the tail [n, bytes] each.
struct TailColumn {
  char* data;
  int32_t from, bytes;  // in the row's tail
};
struct RowColumns {
  char* weights;
  std::vector<TailColumn> tail;
};
void export_rows(const Rows& rows, const uint32_t* slots, int64_t n, const RowColumns& to, int threads);
// To slots, with these flags. Columns that are not given are as at birth. REQUIRES: the slots differ.
void import_rows(const Rows& rows, const uint32_t* slots, int64_t n, const RowColumns& from, const float* first_state,
                 const Birth& at, uint32_t flags, int threads);

// Stamps rows in use. Several threads may do it at the same time.
void stamp(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t clock);
// Raises the scores of rows in use to `score`. `changed`, if it is not null, gets the rows that were not flagged
// changed. Throws std::bad_alloc, and then nothing has changed.
void touch(const Rows& rows, const uint32_t* slots, int64_t n, double score, ChangedRows* changed);

struct RowsKernel {
  void (*birth)(const Rows& rows, const Init& init, const float* state, const Birth& at, const int64_t* keys,
                const uint32_t* slots, int64_t n, float* scratch);
  void (*read_weights)(const Rows& rows, const Init& missing, const int64_t* keys, const uint32_t* slots, int64_t n,
                       float* out);
  void (*write_weights)(const Rows& rows, const uint32_t* slots, int64_t n, const float* in);
};
SHOAL_DISPATCH(RowsKernel, rows_kernel)

}  // namespace shoal
