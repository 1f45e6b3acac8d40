#include "kernels/rows_io.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "base/thread_pool.h"

namespace shoal {

static constexpr int64_t kRowsPerTask = 1024;
// Slots ahead whose flags and keys are asked for.
static constexpr int64_t kSlotsAhead = 16;

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
  for (int64_t i = 0; i < n; ++i) {
    if (i + kSlotsAhead < n) __builtin_prefetch(&rows.flags(rows.tail(slots[i + kSlotsAhead])), 1);
    rows.flags(rows.tail(slots[i])) &= ~flags;
  }
}

std::vector<int64_t> changed_keys(const Rows& rows, const uint32_t* slots, int64_t n) {
  std::vector<int64_t> keys;
  keys.reserve(static_cast<size_t>(n));
  auto is_there = [&](uint32_t slot) { return slot >> rows.slot_bits < rows.slab_count; };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kSlotsAhead < n && is_there(slots[i + kSlotsAhead])) {
      __builtin_prefetch(rows.tail(slots[i + kSlotsAhead]));
      __builtin_prefetch(&rows.key(slots[i + kSlotsAhead]));
    }
    if (is_there(slots[i]) && rows.flags(rows.tail(slots[i])) & kChanged) keys.push_back(rows.key(slots[i]));
  }
  return keys;
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

// Rows ahead that are asked for: a table's keys do not lie in the order of its slots.
static constexpr int64_t kRowsAhead = 8;

static void ask(const Rows& rows, uint32_t slot) {
  for (int64_t at = 0; at < rows.weight_bytes; at += 64) __builtin_prefetch(rows.weights(slot) + at);
  for (int64_t at = 0; at < rows.tail_bytes; at += 64) __builtin_prefetch(rows.tail(slot) + at);
}

void export_rows(const Rows& rows, const uint32_t* slots, int64_t n, const RowColumns& to, int threads) {
  const size_t bytes = size_t(rows.weight_bytes);
  by_task(n, threads, [&](int64_t from, int64_t count) {
    const int64_t end = from + count;
    for (int64_t i = from; i < std::min(from + kRowsAhead, end); ++i) ask(rows, slots[i]);
    for (int64_t i = from; i < end; ++i) {
      if (i + kRowsAhead < end) ask(rows, slots[i + kRowsAhead]);
      char* tail = rows.tail(slots[i]);
      std::memcpy(to.weights + i * rows.weight_bytes, rows.weights(slots[i]), bytes);
      for (const StateColumn& column : to.state)
        std::memcpy(column.data + i * column.width, rows.state(tail) + column.from, size_t(column.width) * 4);
      if (to.scores) to.scores[i] = rows.score(tail);
    }
  });
}

void import_rows(const Rows& rows, const uint32_t* slots, int64_t n, const RowColumns& from, const float* first_state,
                 const Birth& at, uint32_t flags, int threads) {
  const size_t bytes = size_t(rows.weight_bytes);
  int64_t given = 0;
  for (const StateColumn& column : from.state) given += column.width;
  const bool is_whole = given == rows.state_floats;
  by_task(n, threads, [&](int64_t first, int64_t count) {
    const int64_t end = first + count;
    for (int64_t i = first; i < std::min(first + kRowsAhead, end); ++i) ask(rows, slots[i]);
    for (int64_t i = first; i < end; ++i) {
      if (i + kRowsAhead < end) ask(rows, slots[i + kRowsAhead]);
      char* tail = rows.tail(slots[i]);
      std::memcpy(rows.weights(slots[i]), from.weights + i * rows.weight_bytes, bytes);
      if (!is_whole) std::memcpy(rows.state(tail), first_state, size_t(rows.state_floats) * 4);
      for (const StateColumn& column : from.state)
        std::memcpy(rows.state(tail) + column.from, column.data + i * column.width, size_t(column.width) * 4);
      rows.set_score(tail, from.scores ? from.scores[i] : at.score);
      rows.flags(tail) = stamped(flags, at.clock);
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

void touch(const Rows& rows, const uint32_t* slots, int64_t n, double score, ChangedRows* changed) {
  if (changed) changed->expect(n);
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] == kNoSlot) continue;
    char* tail = rows.tail(slots[i]);
    if (rows.score(tail) >= score || rows.flags(tail) & kErased) continue;
    rows.set_score(tail, score);
    if (changed && !(rows.flags(tail) & kChanged)) changed->add_slots(&slots[i], 1);
    rows.flags(tail) |= kChanged | kDirty;
  }
}

}  // namespace shoal
