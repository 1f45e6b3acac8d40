#include "kernels/rows_io.h"

#include <algorithm>
#include <atomic>
#include <cstring>
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

void read_column(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t bytes, const char* missing,
                 char* out) {
  for (int64_t i = 0; i < n; ++i) {
    const char* column = slots[i] == kNoSlot ? missing : rows.tail(slots[i]) + from;
    std::copy(column, column + bytes, out + i * bytes);
  }
}

void write_column(const Rows& rows, const uint32_t* slots, int64_t n, int32_t from, int32_t bytes, const char* in) {
  for (int64_t i = 0; i < n; ++i) std::copy(in + i * bytes, in + (i + 1) * bytes, rows.tail(slots[i]) + from);
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

static int64_t state_and_score_bytes(const Rows& rows) { return 4 * int64_t{rows.state_floats} + 8; }

int64_t packed_bytes(const Rows& rows) { return rows.weight_bytes + state_and_score_bytes(rows) + rows.fact_bytes; }

void pack(const Rows& rows, const uint32_t* slots, int64_t n, char* out, int threads) {
  const size_t weights = size_t(rows.weight_bytes), rest = size_t(state_and_score_bytes(rows));
  const size_t facts = size_t(rows.fact_bytes), whole = weights + rest + facts;
  by_task(n, threads, [&](int64_t from, int64_t count) {
    char* at = out + from * int64_t(whole);
    for (int64_t i = from; i < from + count; ++i, at += whole) {
      char* tail = rows.tail(slots[i]);
      std::memcpy(at, rows.weights(slots[i]), weights);
      std::memcpy(at + weights, tail, rest);
      if (facts) std::memcpy(at + weights + rest, rows.facts(tail), facts);
    }
  });
}

void unpack(const Rows& rows, const uint32_t* slots, int64_t n, const char* in, uint32_t clock, int threads) {
  const size_t weights = size_t(rows.weight_bytes), rest = size_t(state_and_score_bytes(rows));
  const size_t facts = size_t(rows.fact_bytes), whole = weights + rest + facts;
  by_task(n, threads, [&](int64_t from, int64_t count) {
    const char* at = in + from * int64_t(whole);
    for (int64_t i = from; i < from + count; ++i, at += whole) {
      char* tail = rows.tail(slots[i]);
      std::memcpy(rows.weights(slots[i]), at, weights);
      std::memcpy(tail, at + weights, rest);
      if (facts) std::memcpy(rows.facts(tail), at + weights + rest, facts);
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
      for (const TailColumn& column : to.tail)
        std::memcpy(column.data + i * column.bytes, tail + column.from, size_t(column.bytes));
    }
  });
}

void import_rows(const Rows& rows, const uint32_t* slots, int64_t n, const RowColumns& from, const float* first_state,
                 const Birth& at, uint32_t flags, int threads) {
  const size_t bytes = size_t(rows.weight_bytes);
  int64_t given = 0;
  for (const TailColumn& column : from.tail) given += column.bytes;
  const bool is_whole = given == state_and_score_bytes(rows) + rows.fact_bytes;
  by_task(n, threads, [&](int64_t first, int64_t count) {
    const int64_t end = first + count;
    for (int64_t i = first; i < std::min(first + kRowsAhead, end); ++i) ask(rows, slots[i]);
    for (int64_t i = first; i < end; ++i) {
      if (i + kRowsAhead < end) ask(rows, slots[i + kRowsAhead]);
      char* tail = rows.tail(slots[i]);
      std::memcpy(rows.weights(slots[i]), from.weights + i * rows.weight_bytes, bytes);
      if (!is_whole) {
        std::memcpy(rows.state(tail), first_state, size_t(rows.state_floats) * 4);
        rows.set_score(tail, at.score);
        rows.set_first_facts(tail);
      }
      for (const TailColumn& column : from.tail)
        std::memcpy(tail + column.from, column.data + i * column.bytes, size_t(column.bytes));
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
