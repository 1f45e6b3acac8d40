#include "lookup/victims.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/check.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

// Rows of keys 0 to n - 1, each used at the tick of its number.
struct Table {
  DramStore store{4, Dtype::f32, 1};
  Index index;
  std::vector<uint32_t> slots;

  explicit Table(int64_t n) : slots(size_t(n)) {
    std::vector<int64_t> keys(slots.size());
    for (int64_t i = 0; i < n; ++i) keys[size_t(i)] = i;
    CHECK(store.reserve(n).ok() && index.reserve(n).ok());
    store.take(slots.data(), n);
    CHECK(index.insert(keys.data(), slots.data(), n).ok());
    const float state = 0;
    for (int64_t i = 0; i < n; ++i)
      birth(store.rows(), {}, &state, {0.0, uint32_t(i)}, &keys[size_t(i)], &slots[size_t(i)], 1, 1);
  }
  void clean(int64_t key) { clear_flags(store.rows(), &slots[size_t(key)], 1, kDirty); }
};

void the_oldest_leave_first_and_dirty_ones_stand_in_front() {
  Table table(100);
  for (int64_t key = 0; key < 100; key += 2) table.clean(key);
  Victims victims;
  const Pins none(table.store.rows());
  Victims::Chosen chosen = victims.choose(table.index, table.store.rows(), 100, none, 10);
  std::set<int64_t> keys(chosen.keys.begin(), chosen.keys.end());
  CHECK(keys.size() == 10 && *keys.rbegin() == 9 && chosen.dirty == 5, keys.size(), *keys.rbegin(), chosen.dirty);
  for (size_t i = 0; i < 10; ++i) {
    CHECK((chosen.keys[i] % 2 == 1) == (i < 5), chosen.keys[i]);
    CHECK(chosen.slots[i] == table.slots[size_t(chosen.keys[i])]);
  }
}

void pinned_ones_stay_even_where_nothing_else_is_left() {
  Table table(500);
  Pins pins(table.store.rows());
  pins.add(table.slots.data(), 470);
  const uint32_t missing = kNoSlot;
  pins.add(&missing, 1);
  CHECK(pins.count() == 470, pins.count());
  Victims victims;
  Victims::Chosen chosen = victims.choose(table.index, table.store.rows(), 500, pins, 100);
  CHECK(chosen.keys.size() == 30, chosen.keys.size());
  for (int64_t key : chosen.keys) CHECK(key >= 470, key);
}

void what_left_or_was_used_since_it_was_queued_is_passed_over() {
  Table table(800);
  Victims victims;
  const Pins none(table.store.rows());
  CHECK(victims.choose(table.index, table.store.rows(), 800, none, 1).keys == std::vector<int64_t>{0});
  // Keys 1 to 99 wait in the queue: one leaves, another is used.
  table.index.erase(1);
  stamp(table.store.rows(), &table.slots[2], 1, 900);
  table.index.erase(0);
  Victims::Chosen chosen = victims.choose(table.index, table.store.rows(), 901, none, 3);
  std::sort(chosen.keys.begin(), chosen.keys.end());
  CHECK((chosen.keys == std::vector<int64_t>{3, 4, 5}), chosen.keys[0]);
}

void ages_hold_when_the_clock_comes_round() {
  const uint32_t late = (1u << 24) - 1;
  CHECK(age_of(stamped(kDirty, late), 2) == 3 && age_of(stamped(0, 7), 7) == 0);
  CHECK((stamped(kChanged | kErased, late) & kFlagBits) == (kChanged | kErased));
}

void many_leave_from_a_large_table_in_an_order_near_their_age() {
  Table table(200000);
  Victims victims;
  const Pins none(table.store.rows());
  int64_t old = 0, all = 0;
  for (int round = 0; round < 20; ++round) {
    Victims::Chosen chosen = victims.choose(table.index, table.store.rows(), 200000, none, 1000);
    CHECK(chosen.keys.size() == 1000);
    for (int64_t key : chosen.keys) {
      old += key < 40000;
      ++all;
      table.index.erase(key);
    }
  }
  CHECK(old > all * 95 / 100, old, all);
}

void many_that_leave_at_once_leave_all_of_the_index_alike() {
  for (const int64_t n : {int64_t{12'000}, int64_t{20'000}, int64_t{50'000}}) {
    Table table(120'000);
    Victims victims;
    const Pins none(table.store.rows());
    int64_t next = 120'000;
    for (uint32_t round = 0; round < 8; ++round) {
      const Victims::Chosen chosen = victims.choose(table.index, table.store.rows(), 200'000 + round, none, n);
      CHECK(int64_t(chosen.keys.size()) == n);
      for (const int64_t key : chosen.keys) table.index.erase(key);
      // Others come in their place.
      std::vector<int64_t> keys(chosen.keys.size());
      for (int64_t& key : keys) key = next++;
      stamp(table.store.rows(), chosen.slots.data(), n, 200'000 + round);
      CHECK(table.index.reserve(n).ok() && table.index.insert(keys.data(), chosen.slots.data(), n).ok());
    }
    constexpr uint64_t kRanges = 16;
    int64_t most = 0, least = table.index.size();
    for (uint64_t range = 0; range < kRanges; ++range) {
      int64_t there = 0;
      const uint64_t extent = table.index.view().high;
      table.index.scan(range * extent / kRanges, (range + 1) * extent / kRanges, [&](int64_t, uint32_t) { ++there; });
      most = std::max(most, there);
      least = std::min(least, there);
    }
    CHECK(most * 10 <= least * 13, n, most, least);
  }
}

void rows_are_packed_and_unpacked_whole() {
  for (Dtype dtype : {Dtype::f32, Dtype::f16}) {
    DramStore store(5, dtype, 3);
    CHECK(store.reserve(4000).ok());
    std::vector<uint32_t> slots(4000);
    store.take(slots.data(), 4000);
    const Rows& rows = store.rows();
    const int64_t bytes = packed_bytes(rows);
    CHECK(bytes == 5 * (dtype == Dtype::f32 ? 4 : 2) + 3 * 4 + 8, bytes);
    std::vector<char> given(size_t(bytes) * 4000), got(given.size());
    Random random(3);
    for (char& byte : given) byte = char(random.below(256));
    for (int threads : {1, 3}) {
      for (uint32_t slot : slots) rows.flags(rows.tail(slot)) = kDirty;
      unpack(rows, slots.data(), 4000, given.data(), 77, threads);
      pack(rows, slots.data(), 4000, got.data(), threads);
      CHECK(got == given);
      for (uint32_t slot : slots) CHECK(rows.flags(rows.tail(slot)) == stamped(0, 77));
    }
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::the_oldest_leave_first_and_dirty_ones_stand_in_front();
  shoal::pinned_ones_stay_even_where_nothing_else_is_left();
  shoal::what_left_or_was_used_since_it_was_queued_is_passed_over();
  shoal::ages_hold_when_the_clock_comes_round();
  shoal::many_leave_from_a_large_table_in_an_order_near_their_age();
  shoal::many_that_leave_at_once_leave_all_of_the_index_alike();
  shoal::rows_are_packed_and_unpacked_whole();
}
