#include "lookup/batch_lookup.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

constexpr int32_t kDim = 3;
constexpr Init kOnes{InitKind::constant, 1.0f, 0.0f, 0};
constexpr Init kZeros{};

struct Table {
  DramStore store{kDim, Dtype::f32, 0};
  Index index;
  Tally tally;

  void add(const int64_t* keys, int64_t n, uint32_t* slots) {
    CHECK(store.reserve(n).ok() && index.reserve(n).ok());
    store.take(slots, n);
    CHECK(index.insert(keys, slots, n).ok());
    birth(store.rows(), kOnes, nullptr, {}, keys, slots, n, 1);
  }
  LookupFeature feature(int64_t source, int64_t column) {
    return {&index, {&store.rows(), source, Pooling::sum, false, kZeros, nullptr, 0, 0}, &tally, column, true, false};
  }
};

// Two features of two bags each: {1 1} {2}, then {} {2 3}.
struct Given {
  std::vector<int64_t> keys = {1, 1, 2, 2, 3}, offsets = {0, 2, 3, 3, 5};

  LookupBatch::Numbers key_numbers() const { return {keys.data(), static_cast<int64_t>(keys.size()), false}; }
  LookupBatch::Numbers offset_numbers() const { return {offsets.data(), static_cast<int64_t>(offsets.size()), false}; }
  LookupBatch batch() const { return {key_numbers(), offset_numbers(), nullptr, 2, 1}; }
};

// What a row of each table's output holds, where each row of a table is ones.
std::vector<float> filled(std::vector<float> each) {
  std::vector<float> out;
  for (float one : each) out.insert(out.end(), kDim, one);
  return out;
}

void what_waits_for_rows_is_written_and_counted_by_finish() {
  for (int threads : {1, 3}) {
    Table first, second;
    uint32_t slot[2];
    const int64_t known[] = {1, 2};
    first.add(known, 2, slot);
    second.add(known, 1, slot);
    BatchLookup lookup;
    lookup.add(first.feature(0, 0));
    lookup.add(second.feature(1, kDim));
    const Given given;
    LookupBatch batch = given.batch();
    CHECK(batch.check().ok());
    std::vector<float> out(4 * kDim, -1.0f);
    auto* at = reinterpret_cast<char*>(out.data());
    const std::vector<int64_t> lacks = lookup.run(batch, at, 2 * kDim, Dtype::f32, true, false, threads);
    CHECK((lacks == std::vector<int64_t>{0, 2}));
    CHECK(first.tally.lookups == 0 && second.tally.lookups == 0);

    MissingKeys missing({{batch.range(1, 0)}}, batch.keys(), batch.slots(), threads);
    const MissingKeys::Table& of = missing.tables()[0];
    CHECK(of.count == 2, of.count);
    std::vector<uint32_t> slots(2);
    second.add(of.keys, of.count, slots.data());
    missing.fill(0, slots.data(), batch.slots());
    batch.finish(threads);
    CHECK(out == filled({2, 0, 1, 2}));
    CHECK(first.tally.lookups == 3 && first.tally.hits == 3);
    CHECK(second.tally.lookups == 2 && second.tally.hits == 0);

    // A batch whose rows are all there waits for nothing.
    LookupBatch again = given.batch();
    std::fill(out.begin(), out.end(), -1.0f);
    CHECK(lookup.run(again, at, 2 * kDim, Dtype::f32, true, false, threads).empty());
    CHECK(out == filled({2, 0, 1, 2}));
    CHECK(second.tally.lookups == 4 && second.tally.hits == 2);
  }
}

void in_eval_nothing_waits_and_missing_keys_read_as_they_should() {
  Table table;
  uint32_t slot;
  const int64_t known = 2;
  table.add(&known, 1, &slot);
  BatchLookup lookup;
  lookup.add(table.feature(0, 0));
  lookup.add(table.feature(1, kDim));
  const Given given;
  LookupBatch batch = given.batch();
  std::vector<float> out(4 * kDim, -1.0f);
  CHECK(lookup.run(batch, reinterpret_cast<char*>(out.data()), 2 * kDim, Dtype::f32, false, false, 1).empty());
  CHECK(out == filled({0, 0, 1, 1}));
  CHECK(table.tally.lookups == 5 && table.tally.hits == 2);
}

void rows_of_one_feature_come_after_those_of_the_other() {
  Table first, second;
  uint32_t slots[3];
  const int64_t keys[] = {1, 2, 3};
  first.add(keys, 3, slots);
  second.add(keys, 3, slots);
  LookupFeature features[] = {first.feature(0, 0), second.feature(1, 0)};
  BatchLookup lookup;
  for (LookupFeature& one : features) {
    one.pool.pooling = Pooling::none;
    lookup.add(one);
  }
  const Given given;
  LookupBatch batch = given.batch();
  std::vector<float> out(5 * kDim + 1, -1.0f);
  CHECK(lookup.run(batch, reinterpret_cast<char*>(out.data()), -1, Dtype::f32, true, false, 1).empty());
  CHECK(std::all_of(out.begin(), out.end() - 1, [](float x) { return x == 1.0f; }) && out.back() == -1.0f);
}

void slots_that_were_found_ahead_are_used() {
  Table table;
  uint32_t slots[2];
  const int64_t keys[] = {1, 2};
  table.add(keys, 2, slots);
  BatchLookup lookup;
  lookup.add(table.feature(0, 0));
  lookup.add(table.feature(1, kDim));
  Given given;
  LookupBatch batch = given.batch();
  RwLock indexes;
  batch.begin_ahead();
  const MissingKeys missing = lookup.find(batch, indexes, {{0, 1}}, 1);
  CHECK(missing.tables()[0].count == 1 && missing.tables()[0].keys[0] == 3);
  CHECK(batch.has_bags_of(given.key_numbers(), given.offset_numbers()));
  std::vector<float> out(4 * kDim, -1.0f);
  CHECK(lookup.run(batch, reinterpret_cast<char*>(out.data()), 2 * kDim, Dtype::f32, false, true, 1).empty());
  CHECK(out == filled({2, 0, 1, 1}));
  given.offsets = {0, 1, 3, 3, 5};
  CHECK(!batch.has_bags_of(given.key_numbers(), given.offset_numbers()));
}

void a_batch_is_bound_again_to_its_own_bags_only() {
  Given given;
  LookupBatch batch = given.batch();
  const Given copy;
  CHECK(batch.bind_again(copy.key_numbers(), copy.offset_numbers(), nullptr).ok());
  given.offsets = {0, 2, 4, 4, 5};  // the second feature begins elsewhere
  CHECK(batch.bind_again(given.key_numbers(), given.offset_numbers(), nullptr).code() == Code::input);
  given.offsets = {0, 2, 1, 3, 5};
  CHECK(!batch.bind_again(given.key_numbers(), given.offset_numbers(), nullptr).ok());
  given.keys.pop_back();
  CHECK(!batch.bind_again(given.key_numbers(), given.offset_numbers(), nullptr).ok());
  CHECK(!LookupBatch({copy.keys.data(), 4, false}, copy.offset_numbers(), nullptr, 2, 1).check().ok());
}

}  // namespace
}  // namespace shoal

int main() {
  using namespace shoal;
  what_waits_for_rows_is_written_and_counted_by_finish();
  in_eval_nothing_waits_and_missing_keys_read_as_they_should();
  rows_of_one_feature_come_after_those_of_the_other();
  slots_that_were_found_ahead_are_used();
  a_batch_is_bound_again_to_its_own_bags_only();
}
