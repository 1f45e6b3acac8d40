// A table as the layer above uses it: lookup threads find and pool at the same time under a shared lock, and one writer
// inserts, updates, erases and compacts under an exclusive one. Made for a race detector, and for what it cannot see: a
// lookup must find rows as they are between two steps of the writer.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/rwlock.h"
#include "index/batch.h"
#include "index/index.h"
#include "kernels/pool.h"
#include "kernels/rows_io.h"
#include "kernels/update.h"
#include "lookup/lookup.h"
#include "store/dram.h"

namespace shoal {
namespace {

constexpr int32_t kDim = 48;
constexpr int64_t kPairs = 45000;  // keys come and go in pairs 2 i, 2 i + 1
constexpr int64_t kBatchPairs = 3000;
constexpr int kReaders = 3;
const Init kInit{InitKind::constant, 1.0f, 0.0f, 0};

struct Table {
  RwLock lock;
  Index index;
  DramStore store{kDim, Dtype::f32, 1};
  int64_t compacting_from = 0;
};

Bags bags_of(const std::vector<int64_t>& keys, const std::vector<int64_t>& offsets,
             const std::vector<uint32_t>& slots) {
  Bags bags;
  bags.keys = keys.data();
  bags.offsets = offsets.data();
  bags.batch = static_cast<int64_t>(offsets.size()) - 1;
  bags.slots = slots.data();
  return bags;
}

// One bag for each pair: its two keys.
struct Batch {
  std::vector<int64_t> keys, offsets = {0};
  std::vector<uint32_t> slots;

  Batch(Random& random, int64_t pairs, int64_t first_pair, int64_t past_pair) {
    for (int64_t i = 0; i < pairs; ++i) {
      int64_t pair = first_pair + random.below(past_pair - first_pair);
      keys.push_back(2 * pair);
      keys.push_back(2 * pair + 1);
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    slots.resize(keys.size());
  }
  Bags bags() const { return bags_of(keys, offsets, slots); }
  int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

void insert_missing(Table& table, Batch& batch) {
  int64_t lacking = 0;
  find({{&table.index, 0, batch.size()}}, {batch.keys.data(), false}, batch.slots.data(), &lacking, 2);
  MissingKeys all({{{&table.index, 0, batch.size()}}}, {batch.keys.data(), false}, batch.slots.data(), 2);
  const MissingKeys::Table& missing = all.tables()[0];
  int64_t n = missing.count;
  CHECK((lacking == 0) == (n == 0), lacking, n);
  if (n == 0) return;
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  CHECK(table.store.reserve(n).ok() && table.index.reserve(n).ok());
  table.store.take(slots.data(), n);
  CHECK(table.index.insert(missing.keys, slots.data(), n).ok());
  const float state = 0;
  birth(table.store.rows(), kInit, &state, {}, missing.keys, slots.data(), n, 2);
  all.fill(0, slots.data(), batch.slots.data());
}

// The same gradient for all columns and for both keys of a pair.
void update_rows(Table& table, const Batch& batch, Random& random, int64_t step) {
  std::vector<float> grads;
  for (size_t bag = 0; bag + 1 < batch.offsets.size(); ++bag) grads.insert(grads.end(), kDim, random.unit());
  UpdateTable settings;
  settings.rows = &table.store.rows();
  settings.optimizer = Optimizer::rowwise_adagrad;
  settings.hyper = {0.1f, {1e-6f}};
  settings.score = static_cast<double>(step);
  std::vector<UpdateCounts> counts = update({settings}, {{0, 0, Pooling::sum, grads.data(), kDim}}, batch.bags(), 2);
  CHECK(counts[0].rows > 0 && counts[0].dropped == 0 && counts[0].nonfinite == 0);
}

void erase_pairs(Table& table, Random& random, int64_t pairs, int64_t past_pair) {
  std::vector<uint32_t> slots;
  for (int64_t i = 0; i < pairs; ++i) {
    int64_t pair = random.below(past_pair);
    for (int64_t key : {2 * pair, 2 * pair + 1})
      if (uint32_t slot = table.index.erase(key); slot != kNoSlot) slots.push_back(slot);
  }
  table.store.give(slots.data(), static_cast<int64_t>(slots.size()));
}

void compact(Table& table, int64_t budget) {
  table.index.shrink(budget);
  if (!table.store.sparse()) {
    table.compacting_from = 0;
    return;
  }
  int64_t extent = static_cast<int64_t>(table.index.extent()), end = std::min(table.compacting_from + budget, extent);
  std::vector<int64_t> keys;
  std::vector<uint32_t> from;
  table.index.scan(static_cast<uint64_t>(table.compacting_from), static_cast<uint64_t>(end),
                   [&](int64_t key, uint32_t slot) {
                     if (slot < table.store.compact_from()) return;
                     keys.push_back(key);
                     from.push_back(slot);
                   });
  std::vector<uint32_t> to(from.size());
  table.store.take(to.data(), static_cast<int64_t>(to.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    table.store.move(from[i], to[i]);
    table.index.reassign(keys[i], to[i]);
  }
  table.store.give(from.data(), static_cast<int64_t>(from.size()));
  table.compacting_from = end >= extent ? 0 : end;
  table.store.release_tail();
}

// Both keys of a pair are there or neither is, every row is whole, and both rows are equal.
void read_rows(Table& table, Random& random) {
  Batch batch(random, 400, 0, kPairs);
  std::vector<float> rows(batch.keys.size() * kDim, -1e9f), sums((batch.offsets.size() - 1) * kDim, -1e9f);
  table.lock.lock_shared();
  PoolFeature feature{&table.store.rows(), 0, Pooling::none, false, kInit, reinterpret_cast<char*>(rows.data()), kDim};
  lookup({{&table.index, feature, false}}, batch.bags(), batch.slots.data(), nullptr, Dtype::f32, 2);
  feature.pooling = Pooling::sum;
  feature.out = reinterpret_cast<char*>(sums.data());
  lookup({{&table.index, feature, false}}, batch.bags(), batch.slots.data(), nullptr, Dtype::f32, 2);
  table.lock.unlock();
  for (size_t i = 0; i < batch.keys.size(); i += 2) {
    CHECK((batch.slots[i] == kNoSlot) == (batch.slots[i + 1] == kNoSlot), batch.keys[i]);
    CHECK(batch.slots[i] == kNoSlot || batch.slots[i] != batch.slots[i + 1], batch.keys[i]);
    float value = rows[i * kDim];
    for (size_t j = 0; j < 2 * kDim; ++j)
      CHECK(rows[i * kDim + j] == value, batch.keys[i], j, rows[i * kDim + j], value);
    for (size_t j = 0; j < kDim; ++j) CHECK(sums[i / 2 * kDim + j] == value + value, batch.keys[i], j);
    CHECK(batch.slots[i] != kNoSlot || value == 1.0f, batch.keys[i], value);
  }
}

void readers_see_whole_rows_beside_a_writer() {
  Table table;
  std::atomic<bool> done{false};
  std::atomic<int64_t> reads{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < kReaders; ++r)
    readers.emplace_back([&, r] {
      Random random(static_cast<uint64_t>(100 + r));
      while (!done.load()) {
        read_rows(table, random);
        reads.fetch_add(1);
      }
    });

  // Twice up to so many keys that the index grows in place, and down again to a few.
  Random random(1);
  int64_t step = 0, most = 0, most_slabs = 0, most_index_bytes = 0, half_way = 0;
  for (int round = 0; round < 2; ++round)
    for (bool up : {true, false})
      for (int i = 0; i < 45; ++i, ++step) {
        table.lock.lock();
        int64_t past = up ? std::max<int64_t>(kPairs * (i + 1) / 45, 10) : kPairs;
        if (up || i % 4 == 0) {
          Batch batch(random, up ? kBatchPairs : 20, 0, past);
          insert_missing(table, batch);
          update_rows(table, batch, random, step);
        }
        erase_pairs(table, random, up ? 50 : kPairs / 10, past);
        compact(table, 4096);
        CHECK(table.index.size() == table.store.live(), table.index.size(), table.store.live());
        most = std::max(most, table.index.size());
        most_slabs = std::max(most_slabs, table.store.slabs());
        most_index_bytes = std::max(most_index_bytes, table.index.bytes());
        half_way += table.index.view().low != table.index.view().high;
        table.lock.unlock();
        // Every step is seen by someone.
        int64_t seen = reads.load();
        while (reads.load() < seen + 2) std::this_thread::yield();
      }
  done.store(true);
  for (std::thread& reader : readers) reader.join();
  CHECK(most > 65000 && most_slabs > 4 && half_way > 10, most, most_slabs, half_way);
  CHECK(table.index.size() < most / 4 && table.store.slabs() < most_slabs, table.index.size(), table.store.slabs());
  CHECK(table.index.bytes() < most_index_bytes / 2, table.index.bytes(), most_index_bytes);
}

void a_waiting_writer_comes_before_new_readers() {
  RwLock lock;
  std::atomic<bool> written{false};
  lock.lock_shared();
  std::thread writer([&] {
    lock.lock();
    written.store(true);
    lock.unlock();
  });
  // Shared holders that overlap would keep a writer out for ever.
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&] {
      while (!written.load()) {
        lock.lock_shared();
        std::this_thread::yield();
        lock.unlock();
      }
    });
  lock.unlock();
  writer.join();
  for (std::thread& reader : readers) reader.join();
  CHECK(written.load());
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::readers_see_whole_rows_beside_a_writer();
  shoal::a_waiting_writer_comes_before_new_readers();
}
