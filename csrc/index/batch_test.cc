#include "index/batch.h"

#include <algorithm>
#include <unordered_map>

#include "base/check.h"

namespace shoal {
namespace {

// An index that holds keys [0, n), each at slot key + 7.
void fill(Index& index, int64_t n) {
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots;
  for (int64_t key = 0; key < n; ++key) {
    keys.push_back(key);
    slots.push_back(static_cast<uint32_t>(key + 7));
  }
  CHECK(index.reserve(n).ok() && index.insert(keys.data(), slots.data(), n).ok());
}

void finds_ranges_of_several_indexes() {
  Index empty, small, large;
  fill(small, 10);
  fill(large, 50000);
  Random random(1);
  constexpr int64_t kKeys = 60000;
  const std::vector<KeyRange> ranges = {{&large, 0, 30000},
                                        {&empty, 30000, 40000},
                                        {&small, 40000, 40000},
                                        {&small, 40001, 50000},
                                        {&large, 50000, kKeys}};
  std::vector<int64_t> wide;
  std::vector<int32_t> narrow;
  for (int64_t i = 0; i < kKeys; ++i) {
    wide.push_back(random.below(100000) - 20000);
    narrow.push_back(static_cast<int32_t>(wide.back()));
  }
  constexpr uint32_t kUntouched = 123456789;
  for (const std::string& isa : available_isas())
    for (int threads : {1, 2, 5})
      for (bool is_narrow : {false, true}) {
        CHECK(set_isa(isa));
        Keys keys{is_narrow ? static_cast<const void*>(narrow.data()) : wide.data(), is_narrow};
        std::vector<uint32_t> slots(kKeys, kUntouched);
        std::vector<int64_t> missing(ranges.size(), -1);
        find(ranges, keys, slots.data(), missing.data(), threads);
        CHECK(slots[40000] == kUntouched);  // of no range
        for (size_t r = 0; r < ranges.size(); ++r) {
          int64_t lost = 0;
          for (int64_t i = ranges[r].begin; i < ranges[r].end; ++i) {
            uint32_t wanted = ranges[r].index->find(keys[i]);
            CHECK(slots[static_cast<size_t>(i)] == wanted, isa, threads, i);
            lost += wanted == kNoSlot;
          }
          CHECK(missing[r] == lost, isa, threads, r, missing[r], lost);
        }
      }
}

void slots_of_a_range_may_stand_elsewhere() {
  Index small, large;
  fill(small, 10);
  fill(large, 1000);
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 300; ++i) keys.push_back(i * 37 % 1200);
  // Keys 100 to 300 are in both indexes: the slots of the second follow those of the first.
  const std::vector<KeyRange> ranges = {{&large, 0, 300}, {&small, 100, 300, 300}};
  std::vector<uint32_t> slots(600, 5);
  std::vector<int64_t> lost(2);
  find(ranges, {keys.data(), false}, slots.data(), lost.data(), 2);
  for (size_t i = 0; i < 300; ++i) {
    CHECK(slots[i] == large.find(keys[i]), i);
    CHECK(slots[300 + i] == (i < 100 ? 5 : small.find(keys[i])), i);
  }
  // With another table, so that its own memory does not begin at the start.
  MissingKeys missing({{ranges[0]}, {ranges[1]}}, {keys.data(), false}, slots.data(), 2);
  const MissingKeys::Table& of = missing.tables()[1];
  CHECK(missing.tables()[0].places_count == lost[0] && of.places_count == lost[1], lost[0], lost[1]);
  std::vector<uint32_t> given;
  for (int64_t i = 0; i < of.count; ++i) given.push_back(static_cast<uint32_t>(2000 + of.keys[i]));
  missing.fill(1, given.data(), slots.data());
  for (size_t i = 0; i < 300; ++i) {
    CHECK(slots[i] == large.find(keys[i]), i);
    uint32_t found = small.find(keys[i]);
    if (i >= 100) CHECK(slots[300 + i] == (found == kNoSlot ? 2000 + keys[i] : found), i, slots[300 + i]);
  }
}

void no_ranges_find_nothing() {
  find({}, {nullptr, false}, nullptr, nullptr, 2);
  CHECK(MissingKeys({}, {nullptr, false}, nullptr, 2).tables().empty());
  MissingKeys missing({{}}, {nullptr, false}, nullptr, 2);
  CHECK(missing.tables()[0].count == 0 && missing.tables()[0].places_count == 0);
}

void missing_keys_come_once_in_order_of_appearance() {
  Random random(2);
  for (int64_t distinct : {1, 5, 3000}) {
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots;
    for (int i = 0; i < 9000; ++i) {
      int64_t key = random.below(distinct) * 0x100000001LL - 5;  // as one with its low half alike
      keys.push_back(key);
      slots.push_back(key % 3 == 0 ? 1 : kNoSlot);
    }
    const std::vector<KeyRange> ranges = {{nullptr, 100, 4000}, {nullptr, 4000, 4000}, {nullptr, 5000, 9000}};
    MissingKeys all({ranges}, {keys.data(), false}, slots.data(), 1);
    const MissingKeys::Table& missing = all.tables()[0];
    std::vector<int64_t> wanted;
    std::unordered_map<int64_t, uint32_t> number;
    size_t at = 0;
    for (const KeyRange& range : ranges)
      for (int64_t i = range.begin; i < range.end; ++i) {
        int64_t key = keys[static_cast<size_t>(i)];
        if (slots[static_cast<size_t>(i)] != kNoSlot) continue;
        if (number.emplace(key, wanted.size()).second) wanted.push_back(key);
        CHECK(missing.places[at] == i && missing.which[at] == number[key], i, at);
        ++at;
      }
    CHECK(missing.count == static_cast<int64_t>(wanted.size()) && missing.places_count == static_cast<int64_t>(at));
    CHECK(std::equal(wanted.begin(), wanted.end(), missing.keys), distinct);

    // The same from lists, which another table's stand between.
    std::vector<Lacking> lists;
    for (const KeyRange& range : ranges) {
      lists.emplace_back();
      for (int64_t i = range.begin; i < range.end; ++i)
        if (slots[static_cast<size_t>(i)] == kNoSlot) lists.back().positions.push_back(i);
    }
    const Lacking shifted{9000, {7, 7000}};
    for (int threads : {1, 3}) {
      MissingKeys listed({{&shifted}, {&lists[0], &lists[1], &lists[2]}}, {keys.data(), false}, threads);
      const MissingKeys::Table& same = listed.tables()[1];
      CHECK(same.count == missing.count && same.places_count == missing.places_count, same.count);
      CHECK(std::equal(same.keys, same.keys + same.count, missing.keys), distinct);
      CHECK(std::equal(same.places, same.places + same.places_count, missing.places), distinct);
      CHECK(std::equal(same.which, same.which + same.places_count, missing.which), distinct);
      CHECK(same.count_after == missing.count_after);
      CHECK(listed.tables()[0].places[0] == 9007 && listed.tables()[0].places[1] == 16000);
    }

    std::vector<uint32_t> given, before = slots;
    for (size_t i = 0; i < wanted.size(); ++i) given.push_back(static_cast<uint32_t>(1000 + i));
    all.fill(0, given.data(), slots.data());
    size_t filled = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (filled < at && missing.places[filled] == static_cast<int64_t>(i)) {
        CHECK(slots[i] == 1000 + number[keys[i]], i);
        ++filled;
      } else {
        CHECK(slots[i] == before[i], i);
      }
    }
  }
}

void keys_without_others_are_in_order() {
  const std::vector<int64_t> keys = {INT64_MAX, 5, -1, 0, 7, INT64_MIN}, one = {-1, 6, 7}, none = {},
                             two = {INT64_MIN, 5};
  CHECK((keys_without(keys, {}) == std::vector<int64_t>{INT64_MIN, -1, 0, 5, 7, INT64_MAX}));
  const std::vector<std::span<const int64_t>> others = {one, none, two};
  CHECK((keys_without(keys, others) == std::vector<int64_t>{0, INT64_MAX}));
  CHECK(keys_without(none, others).empty());
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::keys_without_others_are_in_order();
  shoal::finds_ranges_of_several_indexes();
  shoal::slots_of_a_range_may_stand_elsewhere();
  shoal::no_ranges_find_nothing();
  shoal::missing_keys_come_once_in_order_of_appearance();
}
