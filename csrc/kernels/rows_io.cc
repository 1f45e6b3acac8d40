#include "kernels/rows_io.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "base/thread_pool.h"

namespace shoal {

static constexpr int64_t kRowsPerTask = 1024;

template <typename Body>
static void by_task(int64_t n, int threads, const Body& body) {
  ThreadPool::instance().run(
      (n + kRowsPerTask - 1) / kRowsPerTask, threads_for(n, kRowsPerTask, threads),
      [&](int64_t task) { body(task * kRowsPerTask, std::min(kRowsPerTask, n - task * kRowsPerTask)); });
}

void birth(const Rows& rows, const Init& init, const float* state, const Birth& at, const int64_t* keys,
           const uint32_t* slots, int64_t n, int threads) {
  const RowsKernel& kernel = rows_kernel();
  by_task(n, threads, [&](int64_t from, int64_t count) {
    auto scratch = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows.dim));
    kernel.birth(rows, init, state, at, keys + from, slots + from, count, scratch.get());
  });
}

void read_weights(const Rows& rows, const Init& missing, const int64_t* keys, const uint32_t* slots, int64_t n,
                  float* out, int threads) {
  const RowsKernel& kernel = rows_kernel();
  by_task(n, threads, [&](int64_t from, int64_t count) {
    kernel.read_weights(rows, missing, keys + from, slots + from, count, out + from * rows.dim);
  });
}

void write_weights(const Rows& rows, const uint32_t* slots, int64_t n, const float* in) {
  rows_kernel().write_weights(rows, slots, n, in);
  set_flags(rows, slots, n, kChanged | kDirty);
}

void read_state(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t width, const float* missing,
                float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float* state = slots[i] == kNoSlot ? missing : rows.state(rows.tail(slots[i])) + from;
    std::copy(state, state + width, out + i * width);
  }
}

void write_state(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t width, const float* in) {
  for (int64_t i = 0; i < n; ++i)
    std::copy(in + i * width, in + (i + 1) * width, rows.state(rows.tail(slots[i])) + from);
  set_flags(rows, slots, n, kChanged | kDirty);
}

void read_scores(const Rows& rows, const uint32_t* slots, int64_t n, double* out) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = slots[i] == kNoSlot ? std::numeric_limits<double>::quiet_NaN() : rows.score(rows.tail(slots[i]));
}

void write_scores(const Rows& rows, const uint32_t* slots, int64_t n, const double* in) {
  for (int64_t i = 0; i < n; ++i) rows.set_score(rows.tail(slots[i]), in[i]);
  set_flags(rows, slots, n, kChanged | kDirty);
}

void set_flags(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t flags) {
  for (int64_t i = 0; i < n; ++i) rows.flags(rows.tail(slots[i])) |= flags;
}

void clear_flags(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t flags) {
  for (int64_t i = 0; i < n; ++i) rows.flags(rows.tail(slots[i])) &= ~flags;
}

int64_t packed_bytes(const Rows& rows) { return rows.weight_bytes + 4 * int64_t{rows.state_floats} + 8; }

void pack(const Rows& rows, const uint32_t* slots, int64_t n, char* out, int threads) {
  const size_t weights = size_t(rows.weight_bytes), rest = size_t(packed_bytes(rows)) - weights;
  by_task(n, threads, [&](int64_t from, int64_t count) {
    char* at = out + from * int64_t(weights + rest);
    for (int64_t i = from; i < from + count; ++i, at += weights + rest) {
      std::memcpy(at, rows.weights(slots[i]), weights);
      std::memcpy(at + weights, rows.tail(slots[i]), rest);
    }
  });
}

void unpack(const Rows& rows, const uint32_t* slots, int64_t n, const char* in, uint32_t clock, int threads) {
  const size_t weights = size_t(rows.weight_bytes), rest = size_t(packed_bytes(rows)) - weights;
  by_task(n, threads, [&](int64_t from, int64_t count) {
    const char* at = in + from * int64_t(weights + rest);
    for (int64_t i = from; i < from + count; ++i, at += weights + rest) {
      char* tail = rows.tail(slots[i]);
      std::memcpy(rows.weights(slots[i]), at, weights);
      std::memcpy(tail, at + weights, rest);
      rows.flags(tail) = stamped(0, clock);
    }
  });
}

void stamp(const Rows& rows, const uint32_t* slots, int64_t n, uint32_t clock) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] == kNoSlot) continue;
    std::atomic_ref<uint32_t> flags(rows.flags(rows.tail(slots[i])));
    const uint32_t before = flags.load(std::memory_order_relaxed);
    if (stamped(before, clock) != before) flags.store(stamped(before, clock), std::memory_order_relaxed);
  }
}

void touch(const Rows& rows, const uint32_t* slots, int64_t n, double score) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] == kNoSlot) continue;
    char* tail = rows.tail(slots[i]);
    if (rows.score(tail) >= score || rows.flags(tail) & kErased) continue;
    rows.set_score(tail, score);
    rows.flags(tail) |= kChanged | kDirty;
  }
}

}  // namespace shoal
