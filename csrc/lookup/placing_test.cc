#include "lookup/placing.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/failing_heap.h"
#include "kernels/rows_io.h"
#include "lookup/lookup.h"

namespace shoal {
namespace {

constexpr int32_t kDim = 3;

// Weights, state and score of a key, as they are below memory.
std::vector<char> packed(int64_t key) {
  const float floats[kDim + 1] = {static_cast<float>(key), 1, 2, 0.5f * static_cast<float>(key)};
  const double score = static_cast<double>(key) / 4;
  std::vector<char> row(sizeof floats + sizeof score);
  std::memcpy(row.data(), floats, sizeof floats);
  std::memcpy(row.data() + sizeof floats, &score, sizeof score);
  return row;
}

struct Table {
  DramStore store{kDim, Dtype::f32, 1};
  Index index;
  std::vector<int64_t> keys;
  std::vector<char> rows;

  // Some are there already, with rows of zeros.
  explicit Table(const std::vector<int64_t>& there) {
    CHECK(store.keep_keys().ok());
    const int64_t n = static_cast<int64_t>(there.size());
    std::vector<uint32_t> slots(there.size());
    CHECK(store.reserve(n).ok() && index.reserve(n).ok());
    store.take(slots.data(), n);
    CHECK(index.insert(there.data(), slots.data(), n).ok());
    store.name(slots.data(), there.data(), n);
    const float state = 0;
    birth(store.rows(), {}, &state, {}, there.data(), slots.data(), n, 1);
  }
  Placing placing(size_t number, const std::vector<int64_t>& read) {
    keys = read;
    rows.clear();
    for (int64_t key : keys) {
      const std::vector<char> row = packed(key);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    Placing placing;
    placing.index = &index;
    placing.store = &store;
    placing.keys = keys.data();
    placing.rows = rows.data();
    placing.n = static_cast<int64_t>(keys.size());
    placing.clock = 77;
    placing.table = number;
    return placing;
  }
  float first_weight(int64_t key) const {
    const uint32_t slot = index.find(key);
    float row[kDim];
    read_weights(store.rows(), {}, &key, &slot, 1, row, 1);
    return row[0];
  }
};

void rows_that_are_not_there_come_and_their_batch_knows_them() {
  for (int threads : {1, 3})
    for (int64_t many : {0, 1, 300}) {
      Table one({5}), two({});
      std::vector<int64_t> read = {5, -1, INT64_MIN};
      for (int64_t key = 1000; key < 1000 + many; ++key) read.push_back(key);
      // The batch lacked these. No row of 6 is read; 5 came meanwhile.
      const std::vector<int64_t> batch = {5, -1, 6, -1, 8, 9};
      const Lacking of_one{0, {0, 1, 2, 3}}, of_two{0, {4, 5}};
      const MissingKeys missing({{&of_one}, {&of_two}}, {batch.data(), false}, threads);
      std::vector<uint32_t> slots(batch.size(), kNoSlot);
      RwLock indexes;
      std::vector<Placing> tables = {one.placing(0, read), two.placing(1, {9})};
      place(&tables, indexes, missing, slots.data(), threads);
      CHECK(tables[0].status.ok() && tables[0].came == many + 2, tables[0].came);
      CHECK(tables[1].status.ok() && tables[1].came == 1, tables[1].came);
      CHECK(one.index.size() == many + 3 && one.store.live() == many + 3);
      CHECK(one.first_weight(5) == 0 && one.first_weight(-1) == -1.0f && two.first_weight(9) == 9.0f);
      const std::vector<uint32_t> wanted = {one.index.find(5), one.index.find(-1), kNoSlot, one.index.find(-1),
                                            kNoSlot,           two.index.find(9)};
      CHECK(slots == wanted, threads, many);
      // All of the row, and whose it is.
      std::vector<char> back(packed(9).size());
      const uint32_t slot = two.index.find(9);
      pack(two.store.rows(), &slot, 1, back.data(), 1);
      CHECK(back == packed(9));
      CHECK(changed_keys(two.store.rows(), &slot, 1).empty());
      set_flags(two.store.rows(), &slot, 1, kChanged);
      CHECK(changed_keys(two.store.rows(), &slot, 1) == std::vector<int64_t>{9});
    }
}

void where_memory_is_refused_a_table_is_as_it_was() {
  bool was_refused = false, came = false;
  for (int64_t allocations = 0; !came; ++allocations) {
    CHECK(allocations < 200);
    Table one({5}), two({6});
    const std::vector<int64_t> batch = {-1, 9};
    const Lacking of_one{0, {0}}, of_two{0, {1}};
    const MissingKeys missing({{&of_one}, {&of_two}}, {batch.data(), false}, 1);
    std::vector<uint32_t> slots(batch.size(), kNoSlot);
    RwLock indexes;
    std::vector<Placing> tables = {one.placing(0, {-1}), two.placing(1, {9})};
    const bool done = with_heap_for(allocations, [&] { place(&tables, indexes, missing, slots.data(), 1); });
    came = done;
    for (size_t t = 0; t < 2; ++t) {
      const Table& table = t == 0 ? one : two;
      const bool is_in = done && tables[t].status.ok();
      came &= is_in;
      was_refused |= !is_in;
      CHECK(tables[t].came == is_in && table.index.size() == 1 + is_in, allocations);
      CHECK(table.store.live() == 1 + is_in, allocations, table.store.live());
      CHECK((slots[t] != kNoSlot) == is_in, allocations);
    }
    indexes.lock();  // no call still holds it
    indexes.unlock();
  }
  CHECK(was_refused);
}

void others_find_meanwhile() {
  Table table({});
  RwLock indexes;
  std::atomic<bool> is_done{false};
  constexpr int64_t kKeys = 6000;
  std::vector<int64_t> keys(kKeys), offsets = {0, kKeys};
  for (int64_t i = 0; i < kKeys; ++i) keys[static_cast<size_t>(i)] = i;
  std::thread finder([&] {
    std::vector<uint32_t> slots(kKeys);
    std::vector<int64_t> kept(kKeys);
    Bags bags;
    bags.keys = keys.data();
    bags.offsets = offsets.data();
    bags.batch = 1;
    bags.count = kKeys;
    const std::vector<LookupPart> parts = {
        {&table.index, {&table.store.rows(), 0, Pooling::sum, false, {}, nullptr, 0}}};
    size_t lacks = kKeys;
    while (!is_done.load()) {
      const size_t now = find_ahead(parts, bags, offsets, kept.data(), slots.data(), indexes, 1)[0].positions.size();
      CHECK(now <= lacks, now, lacks);
      lacks = now;
    }
  });
  for (int64_t first = 0; first < kKeys; first += 60) {
    const std::vector<int64_t> read(keys.begin() + first, keys.begin() + first + 60);
    Lacking lacking;
    for (int64_t i = 0; i < 60; ++i) lacking.positions.push_back(i);
    const MissingKeys missing({{&lacking}}, {read.data(), false}, 1);
    std::vector<uint32_t> slots(60, kNoSlot);
    std::vector<Placing> tables = {table.placing(0, read)};
    place(&tables, indexes, missing, slots.data(), 2);
    CHECK(tables[0].came == 60 && std::find(slots.begin(), slots.end(), kNoSlot) == slots.end(), first);
  }
  is_done.store(true);
  finder.join();
  for (int64_t key : keys) CHECK(table.first_weight(key) == static_cast<float>(key), key);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::rows_that_are_not_there_come_and_their_batch_knows_them();
  shoal::where_memory_is_refused_a_table_is_as_it_was();
  shoal::others_find_meanwhile();
}
