#include "store/dram.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "base/failing_heap.h"

namespace shoal {
namespace {

std::vector<uint32_t> take(DramStore& store, int64_t n) {
  Status status = store.reserve(n);
  CHECK(status.ok(), status.message());
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  store.take(slots.data(), n);
  return slots;
}

void give(DramStore& store, const std::vector<uint32_t>& slots) {
  store.give(slots.data(), static_cast<int64_t>(slots.size()));
}

// The n-th slot of a store.
uint32_t slot_at(const DramStore& store, int64_t n) {
  const Rows& rows = store.rows();
  return static_cast<uint32_t>(n / rows.rows_per_slab) << rows.slot_bits |
         static_cast<uint32_t>(n % rows.rows_per_slab);
}

// Every byte of a row follows from a number, so that a row that moved can be told from another.
void write_row(const DramStore& store, uint32_t slot, uint64_t number) {
  const Rows& rows = store.rows();
  Random random(number);
  for (int64_t i = 0; i < rows.weight_bytes; ++i) rows.weights(slot)[i] = static_cast<char>(random.next());
  for (int64_t i = 0; i < rows.tail_bytes; ++i) rows.tail(slot)[i] = static_cast<char>(random.next());
}

bool holds_row(const DramStore& store, uint32_t slot, uint64_t number) {
  const Rows& rows = store.rows();
  Random random(number);
  for (int64_t i = 0; i < rows.weight_bytes; ++i)
    if (rows.weights(slot)[i] != static_cast<char>(random.next())) return false;
  for (int64_t i = 0; i < rows.tail_bytes; ++i)
    if (rows.tail(slot)[i] != static_cast<char>(random.next())) return false;
  return true;
}

void layout_fits_every_row_into_its_slab() {
  for (int32_t dim : {1, 2, 3, 16, 17, 64, 100, 129, 1000, 200000})
    for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
      for (int32_t state : {0, 1, dim, 2 * dim + 1}) {
        DramStore store(dim, dtype, state);
        const Rows& rows = store.rows();
        CHECK(rows.weight_bytes == dim * (dtype == Dtype::f32 ? 4 : 2), rows.weight_bytes);
        CHECK(rows.tail_bytes == 4 * int64_t{state} + 12, rows.tail_bytes);
        CHECK(rows.rows_per_slab >= 16 && rows.rows_per_slab <= 1u << rows.slot_bits, rows.rows_per_slab);
        CHECK(rows.tails_at % 64 == 0 && rows.tails_at >= rows.rows_per_slab * rows.weight_bytes);
        // First and last row of the first two slabs, written in full, do not touch each other.
        int64_t per_slab = rows.rows_per_slab;
        std::vector<uint32_t> slots = take(store, 2 * per_slab);
        for (int64_t n : {int64_t{0}, per_slab - 1, per_slab, 2 * per_slab - 1})
          write_row(store, slots[static_cast<size_t>(n)], static_cast<uint64_t>(n));
        for (int64_t n : {int64_t{0}, per_slab - 1, per_slab, 2 * per_slab - 1})
          CHECK(holds_row(store, slots[static_cast<size_t>(n)], static_cast<uint64_t>(n)), dim, state, n);
        uint32_t last = slots.back();
        rows.set_score(rows.tail(last), -2.5);
        rows.flags(rows.tail(last)) = kDirty;
        CHECK(rows.score(rows.tail(last)) == -2.5 && rows.flags(rows.tail(last)) == kDirty);
      }
}

void the_lowest_slots_are_taken() {
  DramStore store(64, Dtype::f32, 1);
  int64_t n = 3 * int64_t{store.rows().rows_per_slab} + 5;
  std::vector<uint32_t> slots = take(store, n);
  for (int64_t i = 0; i < n; ++i) CHECK(slots[static_cast<size_t>(i)] == slot_at(store, i), i);
  CHECK(store.live() == n && store.slabs() == 4, store.live(), store.slabs());

  Random random(1);
  std::set<uint32_t> free;
  for (int round = 0; round < 50; ++round) {
    std::vector<uint32_t> given;
    for (int64_t i = 0; i < n; ++i)
      if (uint32_t slot = slot_at(store, i); random.below(20) == 0 && free.insert(slot).second) given.push_back(slot);
    std::reverse(given.begin(), given.end());
    give(store, given);
    CHECK(store.live() == n - static_cast<int64_t>(free.size()), round);
    int64_t more = random.below(static_cast<int64_t>(free.size()) + 1);
    for (uint32_t slot : take(store, more)) {
      CHECK(slot == *free.begin(), slot, *free.begin());
      free.erase(free.begin());
    }
    CHECK(store.live() == n - static_cast<int64_t>(free.size()) && store.slabs() == 4, round);
  }
}

void rows_stay_where_they_are_while_the_store_grows() {
  DramStore store(33, Dtype::f16, 3);
  std::vector<uint32_t> slots;
  std::vector<char*> at;
  while (store.slabs() < 20) {
    for (uint32_t slot : take(store, store.rows().rows_per_slab / 2 + 1)) {
      slots.push_back(slot);
      if (slots.size() % 1000 == 1) {
        at.push_back(store.rows().weights(slot));
        write_row(store, slot, slot);
      }
    }
  }
  for (size_t i = 0; i < slots.size(); i += 1000) {
    CHECK(store.rows().weights(slots[i]) == at[i / 1000], i);
    CHECK(holds_row(store, slots[i], slots[i]), i);
  }
}

void bytes_after_is_what_bytes_will_say() {
  Random random(2);
  for (int32_t dim : {1, 64, 3000}) {
    DramStore store(dim, Dtype::f32, 1);
    std::vector<uint32_t> live;
    int64_t row = store.rows().weight_bytes + store.rows().tail_bytes;
    CHECK(store.bytes() == 0 && store.bytes_after(0) == 0);
    for (int round = 0; round < 200; ++round) {
      int64_t more = random.below(store.rows().rows_per_slab / 3);
      int64_t said = store.bytes_after(more);
      CHECK(store.bytes_after(0) == store.bytes(), dim, round);
      std::vector<uint32_t> slots = take(store, more);
      CHECK(store.bytes() == said, dim, round, store.bytes(), said);
      CHECK(store.bytes() >= store.live() * row, dim, round);
      live.insert(live.end(), slots.begin(), slots.end());
      if (random.below(3) == 0) {
        std::vector<uint32_t> given;
        for (int64_t i = random.below(static_cast<int64_t>(live.size())); i > 0; --i) {
          std::swap(live[static_cast<size_t>(random.below(static_cast<int64_t>(live.size())))], live.back());
          given.push_back(live.back());
          live.pop_back();
        }
        give(store, given);
        if (random.below(2)) store.release_tail();
      }
    }
    // A small store is charged for the rows it had, not for the slabs it mapped.
    DramStore one(dim, Dtype::f32, 1);
    take(one, 1);
    CHECK(one.bytes() == row, one.bytes());
  }
}

// What a table does: rows of the slabs that a full compaction would empty move to the lowest free slots.
void compact(DramStore& store, std::map<uint64_t, uint32_t>& where) {
  std::vector<uint32_t> from;
  std::vector<uint64_t> numbers;
  for (auto [number, slot] : where)
    if (slot >= store.compact_from()) {
      from.push_back(slot);
      numbers.push_back(number);
    }
  uint32_t limit = store.compact_from();
  std::vector<uint32_t> to(from.size());
  store.take(to.data(), static_cast<int64_t>(to.size()));  // without reserve: there is room before `limit`
  for (size_t i = 0; i < from.size(); ++i) {
    CHECK(to[i] < limit, to[i], limit);
    store.move(from[i], to[i]);
    where[numbers[i]] = to[i];
  }
  give(store, from);
  store.release_tail();
}

void compaction_keeps_the_rows_and_frees_the_slabs() {
  Random random(3);
  for (int32_t dim : {3, 64, 500}) {
    DramStore store(dim, Dtype::bf16, 2);
    std::map<uint64_t, uint32_t> where;
    uint64_t number = 0;
    for (int round = 0; round < 3; ++round) {
      int64_t per_slab = store.rows().rows_per_slab;
      int64_t more = 12 * per_slab - store.live();
      if (dim == 3) more = 4 * per_slab - store.live();
      for (uint32_t slot : take(store, more)) {
        write_row(store, slot, number);
        where[number++] = slot;
      }
      CHECK(!store.sparse());
      std::vector<uint32_t> given;
      for (auto it = where.begin(); it != where.end();)
        if (random.below(4) != 0) {
          given.push_back(it->second);
          it = where.erase(it);
        } else {
          ++it;
        }
      give(store, given);
      CHECK(store.sparse() && store.live() == static_cast<int64_t>(where.size()));
      int64_t bytes = store.bytes(), slabs = store.slabs();
      compact(store, where);
      CHECK(!store.sparse() && store.slabs() < slabs, store.slabs(), slabs);
      CHECK(store.slabs() == (store.live() + per_slab - 1) / per_slab, store.slabs(), store.live());
      CHECK(store.bytes() < bytes && store.bytes() == store.bytes_after(0), store.bytes(), bytes);
      CHECK(store.rows().slab_count == store.slabs());
      for (auto [n, slot] : where) CHECK(holds_row(store, slot, n), dim, n);
    }
  }
}

void an_emptied_store_takes_nothing_and_can_be_filled_again() {
  DramStore store(16, Dtype::f32, 0);
  std::vector<uint32_t> slots = take(store, 100000);
  give(store, slots);
  CHECK(store.live() == 0 && store.sparse() && store.compact_from() == 0);
  store.release_tail();
  CHECK(store.slabs() == 0 && store.bytes() == 0 && !store.sparse());
  store.release_tail();
  slots = take(store, 10);
  CHECK(slots[0] == 0 && slots[9] == 9 && store.slabs() == 1);
  CHECK(store.bytes() == 10 * (store.rows().weight_bytes + store.rows().tail_bytes), store.bytes());
}

void huge_rows() {
  DramStore store(200000, Dtype::f32, 200001);
  std::vector<uint32_t> slots = take(store, 40);
  CHECK(store.slabs() > 1 && store.slabs() < 4, store.slabs());
  std::map<uint64_t, uint32_t> where;
  for (uint32_t slot : slots) {
    write_row(store, slot, slot);
    where[slot] = slot;
  }
  std::vector<uint32_t> given;
  for (size_t i = 0; i < slots.size(); ++i)
    if (i % 10 != 9) {
      given.push_back(slots[i]);
      where.erase(slots[i]);
    }
  give(store, given);
  compact(store, where);
  CHECK(store.slabs() == 1 && where.size() == 4, store.slabs());
  for (auto [number, slot] : where) CHECK(holds_row(store, slot, number), number);
}

void no_row_is_lost_where_the_heap_ends() {
  bool grew = false;
  for (int64_t allocations = 0; !grew; ++allocations) {
    DramStore store(64, Dtype::f32, 1);
    CHECK(store.keep_keys().ok());
    std::vector<uint32_t> slots = take(store, 8 * int64_t{store.rows().rows_per_slab});
    for (size_t i = 0; i < slots.size(); i += 100) write_row(store, slots[i], i);
    Status status;
    CHECK(with_heap_for(allocations, [&] { status = store.reserve(40 * int64_t{store.rows().rows_per_slab}); }));
    CHECK(status.ok() || status.code() == Code::memory, allocations);
    grew = status.ok();
    CHECK(store.rows().slab_count == store.slabs() && store.slabs() >= 8, allocations);
    std::vector<uint32_t> more = take(store, 40 * int64_t{store.rows().rows_per_slab});
    write_row(store, more.back(), 1);
    CHECK(holds_row(store, more.back(), 1), allocations);
    for (size_t i = 0; i < slots.size(); i += 100) CHECK(holds_row(store, slots[i], i), allocations, i);
    give(store, more);
    give(store, slots);
    CHECK(with_heap_for(0, [&] { store.release_tail(); }) && store.slabs() == 0, allocations);
    CHECK(allocations < 1000);
  }
}

void keys_are_kept_where_rows_go() {
  DramStore store(64, Dtype::f32, 1);
  const int64_t rows = 12 * int64_t{store.rows().rows_per_slab};
  std::vector<uint32_t> slots = take(store, rows);
  const int64_t bytes = store.bytes();
  CHECK(!store.keeps_keys() && !store.rows().keys);
  Status status;
  CHECK(with_heap_for(5, [&] { status = store.keep_keys(); }) && status.code() == Code::memory);
  CHECK(!store.keeps_keys() && !store.rows().keys && store.bytes() == bytes);
  CHECK(store.keep_keys().ok() && store.keep_keys().ok() && store.keeps_keys());
  CHECK(store.bytes() == bytes + 8 * rows && store.bytes_after(0) == store.bytes(), store.bytes(), bytes);
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < rows; ++i) keys.push_back(~i);
  store.name(slots.data(), keys.data(), rows);
  std::vector<uint32_t> more = take(store, rows);  // more slabs, which move none
  const int64_t more_key = 7;
  store.name(&more.back(), &more_key, 1);
  for (int64_t i = 0; i < rows; ++i) CHECK(store.rows().key(slots[size_t(i)]) == ~i, i);
  CHECK(store.rows().key(more.back()) == 7);
  store.move(more.back(), slots[3]);
  CHECK(store.rows().key(slots[3]) == 7);
  give(store, more);
  store.release_tail();
  CHECK(store.rows().key(slots.back()) == keys.back());
  store.forget_keys();
  CHECK(!store.keeps_keys() && !store.rows().keys && store.bytes() == bytes, store.bytes(), bytes);
  store.name(slots.data(), keys.data(), rows);  // changes are not tracked
}

#if !SHOAL_SANITIZED
void no_row_is_lost_where_memory_ends() {
  for (size_t extra = 0; extra < 80; extra += 4) {
    DramStore store(64, Dtype::f32, 1);
    std::vector<uint32_t> slots = take(store, 8 * int64_t{store.rows().rows_per_slab});
    for (size_t i = 0; i < slots.size(); i += 100) write_row(store, slots[i], i);
    Status status;
    with_memory_limit((extra << 20) + (1 << 19), [&] { status = store.reserve(1000000); });
    CHECK(status.code() == Code::memory, extra, status.message());
    CHECK(store.live() == static_cast<int64_t>(slots.size()));
    for (size_t i = 0; i < slots.size(); i += 100) CHECK(holds_row(store, slots[i], i), extra, i);
    uint32_t next = take(store, 1)[0];
    CHECK(next == slot_at(store, static_cast<int64_t>(slots.size())), extra, next);
    write_row(store, next, 1);
    CHECK(holds_row(store, next, 1) && holds_row(store, slots[0], 0), extra);
  }
}
#endif

}  // namespace
}  // namespace shoal

int main() {
  shoal::layout_fits_every_row_into_its_slab();
  shoal::the_lowest_slots_are_taken();
  shoal::rows_stay_where_they_are_while_the_store_grows();
  shoal::bytes_after_is_what_bytes_will_say();
  shoal::compaction_keeps_the_rows_and_frees_the_slabs();
  shoal::an_emptied_store_takes_nothing_and_can_be_filled_again();
  shoal::huge_rows();
  shoal::no_row_is_lost_where_the_heap_ends();
  shoal::keys_are_kept_where_rows_go();
#if !SHOAL_SANITIZED
  shoal::no_row_is_lost_where_memory_ends();
#endif
}
