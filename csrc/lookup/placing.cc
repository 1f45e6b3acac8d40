#include "lookup/placing.h"

#include <mutex>
#include <new>
#include <utility>

#include "base/thread_pool.h"
#include "kernels/rows_io.h"

namespace shoal {

namespace {

// The arriving rows of one table.
struct Coming {
  std::vector<int64_t> keys;
  std::vector<int64_t> from;  // the keys' numbers among those that were read
  std::vector<uint32_t> slots;
  std::vector<uint32_t> now;  // the slots of all keys that the batch lacked
};

// The rows that are not in memory yet, and room for them. All memory is allocated before the first slot is taken.
Status begin(const Placing& table, const MissingKeys& missing, Coming* coming) try {
  for (int64_t i = 0; i < table.n; ++i) {
    if (table.index->find(table.keys[i]) != kNoSlot) continue;
    coming->keys.push_back(table.keys[i]);
    coming->from.push_back(i);
  }
  coming->now.resize(static_cast<size_t>(missing.tables()[table.table].count));
  std::vector<uint32_t> slots(coming->keys.size());
  const int64_t n = static_cast<int64_t>(slots.size());
  if (Status status = table.store->reserve(n); !status.ok()) return status;
  table.store->take(slots.data(), n);
  coming->slots = std::move(slots);
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status insert(const Placing& table, const Coming& coming) {
  const int64_t n = static_cast<int64_t>(coming.slots.size());
  if (Status status = table.index->reserve(n); !status.ok()) return status;
  return table.index->insert(coming.keys.data(), coming.slots.data(), n);
}

void write(const Placing& table, Coming& coming, const MissingKeys& missing, uint32_t* slots) {
  const int64_t bytes = packed_bytes(table.store->rows());
  for (size_t i = 0; i < coming.slots.size(); ++i)
    unpack(table.store->rows(), &coming.slots[i], 1, table.rows + coming.from[i] * bytes, table.clock, 1);
  table.store->name(coming.slots.data(), coming.keys.data(), static_cast<int64_t>(coming.slots.size()));
  const MissingKeys::Table& wanted = missing.tables()[table.table];
  for (int64_t i = 0; i < wanted.count; ++i) coming.now[static_cast<size_t>(i)] = table.index->find(wanted.keys[i]);
  missing.fill(table.table, coming.now.data(), slots);
}

}  // namespace

void place(std::vector<Placing>* tables, RwLock& indexes, const MissingKeys& missing, uint32_t* slots, int threads) {
  // A task is a few rows; waking a thread costs as much as some dozen of them.
  constexpr int64_t kRowsPerThread = 32;
  int64_t rows = 0;
  for (const Placing& table : *tables) rows += table.n;
  threads = threads_for(rows, kRowsPerThread, threads);
  std::vector<Coming> coming(tables->size());
  const auto each = [&](const auto& body) {
    ThreadPool::instance().run(static_cast<int64_t>(tables->size()), threads, [&](int64_t t) {
      const size_t i = static_cast<size_t>(t);
      if ((*tables)[i].status.ok()) body((*tables)[i], coming[i]);
    });
  };
  each([&](Placing& table, Coming& come) { table.status = begin(table, missing, &come); });
  {
    std::lock_guard lock(indexes);
    each([](Placing& table, Coming& come) { table.status = insert(table, come); });
  }
  for (size_t i = 0; i < tables->size(); ++i)
    if (!(*tables)[i].status.ok()) (*tables)[i].store->give(coming[i].slots.data(), int64_t(coming[i].slots.size()));
  each([&](Placing& table, Coming& come) {
    write(table, come, missing, slots);
    table.came = static_cast<int64_t>(come.slots.size());
  });
}

}  // namespace shoal
