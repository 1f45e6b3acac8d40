#include "lookup/lookup.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "index/batch.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

constexpr int32_t kDim = 3;
constexpr Init kInit{InitKind::uniform, -1.0f, 2.0f, 5};
constexpr Init kZeros{};

// Rows for the even keys below `keys`.
struct Table {
  DramStore store{kDim, Dtype::f32, 0};
  Index index;

  explicit Table(int64_t keys) {
    std::vector<int64_t> even;
    for (int64_t key = 0; key < keys; key += 2) even.push_back(key);
    add(even);
  }
  std::vector<uint32_t> add(const std::vector<int64_t>& keys) {
    int64_t n = static_cast<int64_t>(keys.size());
    std::vector<uint32_t> slots(keys.size());
    CHECK(store.reserve(n).ok() && index.reserve(n).ok());
    store.take(slots.data(), n);
    CHECK(index.insert(keys.data(), slots.data(), n).ok());
    birth(store.rows(), kInit, nullptr, {}, keys.data(), slots.data(), n, 1);
    return slots;
  }
};

struct Batch {
  int64_t size;
  std::vector<int64_t> keys, offsets = {0};
  std::vector<int32_t> narrow;
  std::vector<uint32_t> slots;

  Batch(int64_t features, int64_t bags, int64_t longest, int64_t below, bool all_known) : size(bags) {
    Random random(7);
    for (int64_t bag = 0; bag < features * bags; ++bag) {
      for (int64_t i = random.below(longest + 1); i > 0; --i)
        keys.push_back(all_known ? random.below(below) / 2 * 2 : random.below(below));
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    narrow.assign(keys.begin(), keys.end());
    slots.assign(2 * keys.size(), 12345);
  }
  Bags bags(bool is_narrow) const {
    Bags bags;
    bags.keys = is_narrow ? static_cast<const void*>(narrow.data()) : keys.data();
    bags.narrow_keys = is_narrow;
    bags.offsets = offsets.data();
    bags.batch = size;
    bags.count = static_cast<int64_t>(keys.size());
    bags.slots = slots.data();
    return bags;
  }
};

// What every bag of a feature must sum to, one row at a time.
std::vector<float> sums(const Table& table, const Batch& batch, int64_t source, bool missing_as_zeros) {
  std::vector<float> wanted;
  for (int64_t bag = source * batch.size; bag < (source + 1) * batch.size; ++bag) {
    float sum[kDim] = {};
    for (int64_t i = batch.offsets[static_cast<size_t>(bag)]; i < batch.offsets[static_cast<size_t>(bag) + 1]; ++i) {
      int64_t key = batch.keys[static_cast<size_t>(i)];
      uint32_t slot = table.index.find(key);
      float row[kDim];
      read_weights(table.store.rows(), missing_as_zeros ? kZeros : kInit, &key, &slot, 1, row, 1);
      for (int d = 0; d < kDim; ++d) sum[d] += row[d];
    }
    wanted.insert(wanted.end(), sum, sum + kDim);
  }
  return wanted;
}

PoolFeature feature_of(const Table& table, int64_t source, int64_t slot_list, std::vector<float>* out) {
  return {
      &table.store.rows(), source, Pooling::sum, false, kZeros, reinterpret_cast<char*>(out->data()), kDim, slot_list};
}

void pools_at_once_what_waits_for_nothing() {
  for (int64_t bags : {0, 1, 50, 3000})
    for (bool narrow : {false, true})
      for (int threads : {1, 3})
        for (bool waits : {false, true}) {
          Table table(1000);
          Batch batch(2, bags, 6, 1000, waits);
          std::vector<float> out(static_cast<size_t>(bags * kDim) + 1, -9.0f);
          std::vector<LookupPart> parts = {{&table.index, feature_of(table, 1, 1, &out), waits}};
          Found found = lookup(parts, batch.bags(narrow), batch.slots.data(), nullptr, Dtype::f32, threads);
          CHECK(found.rest.empty());
          std::vector<float> wanted = sums(table, batch, 1, true);
          CHECK(std::equal(wanted.begin(), wanted.end(), out.begin()) && out.back() == -9.0f, bags, narrow, threads);
          int64_t missing = 0;
          for (size_t i = 0; i < batch.keys.size(); ++i) {
            bool mine = static_cast<int64_t>(i) >= batch.offsets[static_cast<size_t>(bags)];
            uint32_t slot = batch.slots[batch.keys.size() + i];
            CHECK(batch.slots[i] == 12345, i);
            CHECK(slot == (mine ? table.index.find(batch.keys[i]) : 12345), i);
            missing += mine && slot == kNoSlot;
          }
          CHECK(found.missing == std::vector<int64_t>{missing}, missing);
        }
}

// The first feature trains, the second only reads the same table: both see the rows that are born in between.
void pools_the_rest_after_births() {
  for (int64_t bags : {1, 40, 5000})
    for (int threads : {1, 3}) {
      Table table(2000), empty(0);
      Batch batch(3, bags, 6, 2000, false);
      std::vector<float> trained(static_cast<size_t>(bags * kDim)), read = trained, other = trained;
      std::vector<LookupPart> parts = {{&table.index, feature_of(table, 0, 0, &trained), true},
                                       {&table.index, feature_of(table, 1, 0, &read), false},
                                       {&empty.index, feature_of(empty, 2, 0, &other), true}};
      Bags seen = batch.bags(false);
      Found found = lookup(parts, seen, batch.slots.data(), nullptr, Dtype::f32, threads);
      const std::vector<std::pair<size_t, Table*>> births = {{0, &table}, {2, &empty}};
      for (auto [part, into] : births) {
        KeyRange range{nullptr, batch.offsets[part * static_cast<size_t>(bags)],
                       batch.offsets[(part + 1) * static_cast<size_t>(bags)]};
        MissingKeys missing({{range}}, {batch.keys.data(), false}, batch.slots.data(), threads);
        const MissingKeys::Table& of = missing.tables()[0];
        CHECK(of.places_count == found.missing[part], part);
        missing.fill(0, into->add({of.keys, of.keys + of.count}).data(), batch.slots.data());
      }
      pool_rest(parts, found.rest, seen, batch.slots.data(), Dtype::f32, threads);
      CHECK(trained == sums(table, batch, 0, true), bags, threads);
      CHECK(read == sums(table, batch, 1, true), bags, threads);
      CHECK(other == sums(empty, batch, 2, true), bags, threads);
      for (size_t i = 0; i < batch.keys.size(); ++i) {
        const Table& table_of = static_cast<int64_t>(i) < batch.offsets[static_cast<size_t>(2 * bags)] ? table : empty;
        CHECK(batch.slots[i] == table_of.index.find(batch.keys[i]), i);
      }
    }
}

std::vector<int64_t> bounds_of(const Batch& batch, int64_t features) {
  std::vector<int64_t> bounds;
  for (int64_t feature = 0; feature <= features; ++feature)
    bounds.push_back(batch.offsets[static_cast<size_t>(feature * batch.size)]);
  return bounds;
}

void finds_ahead_and_lists_what_it_lacks() {
  for (int64_t bags : {0, 1, 50, 3000})
    for (bool narrow : {false, true})
      for (int threads : {1, 3}) {
        Table table(1000), other(500), empty(0);
        Batch batch(3, bags, 6, 1200, false);
        // The last feature feeds two tables, and its parts do not follow each other.
        std::vector<float> out(static_cast<size_t>(bags * kDim) + 1);
        const std::vector<LookupPart> parts = {{&table.index, feature_of(table, 2, 0, &out), true},
                                               {&empty.index, feature_of(empty, 0, 0, &out), true},
                                               {&other.index, feature_of(other, 2, 1, &out), true}};
        const size_t n = batch.keys.size(), width = narrow ? 4 : 8;
        std::vector<char> kept(n * width + 1);
        RwLock indexes;
        const std::vector<Lacking> found = find_ahead(parts, batch.bags(narrow), bounds_of(batch, 3), kept.data(),
                                                      batch.slots.data(), indexes, threads);
        for (size_t p = 0; p < parts.size(); ++p) {
          const int64_t source = parts[p].feature.source, slot_list = parts[p].feature.slot_list;
          std::vector<int64_t> lacking;
          for (int64_t i = batch.offsets[static_cast<size_t>(source * bags)];
               i < batch.offsets[static_cast<size_t>((source + 1) * bags)]; ++i) {
            const size_t at = static_cast<size_t>(i);
            const uint32_t slot = parts[p].index->find(batch.keys[at]);
            CHECK(batch.slots[static_cast<size_t>(slot_list) * n + at] == slot, p, i);
            if (slot == kNoSlot) lacking.push_back(i);
            const void* key = narrow ? static_cast<const void*>(&batch.narrow[at]) : &batch.keys[at];
            CHECK(std::memcmp(&kept[at * width], key, width) == 0, p, i);
          }
          CHECK(found[p].positions == lacking && found[p].shift == slot_list * static_cast<int64_t>(n), p, bags,
                threads);
        }
        // No part reads the feature in the middle, so its slots are untouched.
        for (size_t i = static_cast<size_t>(batch.offsets[static_cast<size_t>(bags)]);
             i < static_cast<size_t>(batch.offsets[static_cast<size_t>(2 * bags)]); ++i)
          CHECK(batch.slots[i] == 12345 && batch.slots[n + i] == 12345, i);
      }
}

void slots_that_are_known_are_those_of_the_same_keys() {
  for (int64_t bags : {1, 50, 3000})
    for (bool narrow : {false, true})
      for (int threads : {1, 3}) {
        Table table(1000);
        Batch batch(1, bags, 6, 1000, false);
        std::vector<float> out(static_cast<size_t>(bags * kDim) + 1);
        std::vector<LookupPart> parts = {{&table.index, feature_of(table, 0, 0, &out), false}};
        std::vector<char> kept(batch.keys.size() * 8 + 1);
        RwLock indexes;
        find_ahead(parts, batch.bags(narrow), bounds_of(batch, 1), kept.data(), batch.slots.data(), indexes, threads);
        // Some that it lacked are born, and a part of the keys are others by now.
        table.add({1, 3, 77, 501});
        for (size_t i = batch.keys.size() / 2; i < batch.keys.size(); i += 3) {
          batch.keys[i] = (batch.keys[i] + 501) % 1000;
          batch.narrow[i] = static_cast<int32_t>(batch.keys[i]);
        }
        lookup(parts, batch.bags(narrow), batch.slots.data(), kept.data(), Dtype::f32, threads);
        const std::vector<float> wanted = sums(table, batch, 0, true);
        CHECK(std::equal(wanted.begin(), wanted.end(), out.begin()), bags, narrow, threads);
        for (size_t i = 0; i < batch.keys.size(); ++i) CHECK(batch.slots[i] == table.index.find(batch.keys[i]), i);
      }
  // They are not found again.
  Table table(10);
  Batch batch(1, 1, 0, 10, true);
  batch.keys = {2, 4};
  batch.offsets = {0, 2};
  const uint32_t other = table.index.find(8);
  batch.slots = {table.index.find(2), other};
  std::vector<float> out(kDim);
  lookup({{&table.index, feature_of(table, 0, 0, &out), false}}, batch.bags(false), batch.slots.data(),
         batch.keys.data(), Dtype::f32, 1);
  CHECK(batch.slots[1] == other, batch.slots[1]);
}

// What lookup() finds on the way and pools has the bits of finds that came before, of any row, on every instruction set.
void finds_on_the_way_as_before(const std::string& isa, int32_t dim, Dtype dtype, Pooling pooling, bool weighted,
                                bool narrow) {
  CHECK(set_isa(isa), isa);
  constexpr int64_t kBags = 90, kKeys = 400;
  Random random(static_cast<uint64_t>(dim));
  DramStore store(dim, dtype, 0);
  Index index;
  std::vector<int64_t> known;
  for (int64_t key = 0; key < kKeys; key += 2) known.push_back(key);
  const int64_t n = static_cast<int64_t>(known.size());
  std::vector<uint32_t> rows(known.size());
  CHECK(store.reserve(n).ok() && index.reserve(n).ok());
  store.take(rows.data(), n);
  CHECK(index.insert(known.data(), rows.data(), n).ok());
  birth(store.rows(), kInit, nullptr, {}, known.data(), rows.data(), n, 1);

  Batch batch(2, kBags, 40, kKeys, false);
  Bags bags = batch.bags(narrow);
  std::vector<float> weights;
  for (size_t i = 0; i < batch.keys.size(); ++i) weights.push_back(random.unit());
  if (weighted) bags.weights = weights.data();
  const int64_t outputs = pooling == Pooling::none ? bags.offset(2 * kBags) - bags.offset(kBags) : kBags;
  for (bool silent : {false, true})
    for (Dtype out_dtype : {Dtype::f32, Dtype::bf16}) {
      std::vector<float> before(static_cast<size_t>(outputs * dim) + 1, -9.0f), out = before;
      PoolFeature feature{&store.rows(), 1, pooling, silent, kInit, reinterpret_cast<char*>(before.data()), dim, 1};
      for (int64_t i = bags.offset(kBags); i < bags.offset(2 * kBags); ++i)
        batch.slots[batch.keys.size() + static_cast<size_t>(i)] = index.find(bags.key(i));
      const std::vector<uint32_t> slots = batch.slots;
      std::vector<PoolTask> tasks;
      split_pool(feature, bags, &tasks);
      for (const PoolTask& task : tasks) pool_task(task, bags, out_dtype);

      std::fill(batch.slots.begin() + static_cast<int64_t>(batch.keys.size()), batch.slots.end(), 12345u);
      feature.out = reinterpret_cast<char*>(out.data());
      const std::vector<LookupPart> parts = {{&index, feature, false}};
      const Found found = lookup(parts, bags, batch.slots.data(), nullptr, out_dtype, 2);
      CHECK(found.rest.empty() && found.missing[0] > 0);
      CHECK(!std::memcmp(out.data(), before.data(), out.size() * sizeof(float)), isa, dim, narrow);
      for (int64_t i = bags.offset(kBags); i < bags.offset(2 * kBags); ++i) {
        const size_t at = batch.keys.size() + static_cast<size_t>(i);
        CHECK(batch.slots[at] == slots[at], i);
      }
    }
}

void finds_on_the_way_as_before_for_any_row() {
  for (const std::string& isa : available_isas())
    for (int32_t dim : {1, 5, 16, 17, 32, 48, 64, 80, 96, 112, 128, 130})
      for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
        for (Pooling pooling : {Pooling::none, Pooling::sum, Pooling::mean})
          for (bool weighted : {false, true})
            for (bool narrow : {false, true}) finds_on_the_way_as_before(isa, dim, dtype, pooling, weighted, narrow);
  CHECK(set_isa(available_isas().back()));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::finds_ahead_and_lists_what_it_lacks();
  shoal::slots_that_are_known_are_those_of_the_same_keys();
  shoal::pools_at_once_what_waits_for_nothing();
  shoal::pools_the_rest_after_births();
  shoal::finds_on_the_way_as_before_for_any_row();
}
