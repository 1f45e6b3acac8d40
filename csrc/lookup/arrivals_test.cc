#include "lookup/arrivals.h"

#include <vector>

#include "base/check.h"
#include "base/failing_heap.h"

namespace shoal {
namespace {

struct Table {
  DramStore store{3, Dtype::f32, 1};
  Index index;
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots;

  explicit Table(std::vector<int64_t> come) : keys(std::move(come)), slots(keys.size(), kNoSlot) {
    CHECK(store.reserve(static_cast<int64_t>(keys.size())).ok());
  }
  Arrival arriving() { return {&index, &store, keys.data(), static_cast<int64_t>(keys.size()), slots.data()}; }
  bool has_all() const {
    for (size_t i = 0; i < keys.size(); ++i)
      if (index.find(keys[i]) != slots[i] || slots[i] == kNoSlot) return false;
    return index.size() == static_cast<int64_t>(keys.size()) && store.live() == index.size();
  }
  bool is_empty() const { return index.size() == 0 && store.live() == 0; }
};

std::vector<int64_t> many(int64_t n) {
  std::vector<int64_t> keys = {0, -1, INT64_MIN, INT64_MAX};
  for (int64_t i = 1; i < n; ++i) keys.push_back(i * 1000003);
  return keys;
}

void keys_come_and_leave() {
  for (int threads : {1, 3}) {
    Table one(many(3000)), two({}), three({7});
    CHECK(arrive({one.arriving(), two.arriving(), three.arriving()}, threads).ok());
    CHECK(one.has_all() && two.is_empty() && three.has_all());
    const std::vector<int64_t> some = {-1, 1000003, 5, -1};  // 5 is not there, and -1 comes twice
    leave(&one.index, &one.store, some.data(), 4);
    CHECK(one.index.size() == 3001 && one.store.live() == 3001);
    CHECK(one.index.find(-1) == kNoSlot && one.index.find(0) == one.slots[0]);
    leave(&one.index, &one.store, one.keys.data(), static_cast<int64_t>(one.keys.size()));
    CHECK(one.is_empty());
  }
}

void where_memory_is_refused_none_comes() {
  bool was_refused = false;
  for (int64_t allocations = 0;; ++allocations) {
    CHECK(allocations < 200);
    Table one(many(2000)), two({7});
    Status status;
    const bool done = with_heap_for(allocations, [&] { status = arrive({one.arriving(), two.arriving()}, 1); });
    if (done && status.ok()) {
      CHECK(one.has_all() && two.has_all());
      break;
    }
    was_refused = true;
    CHECK(one.is_empty() && two.is_empty(), allocations);
  }
  CHECK(was_refused);
}

void slots_of_erased_rows_wait_for_their_leases() {
  Table one(many(100));
  CHECK(arrive({one.arriving()}, 1).ok());
  Limbo limbo;
  const std::vector<int64_t> some = {-1, 5, -1, 0}, more = {INT64_MIN}, none = {5};  // 5 is not there
  limbo.erase(&one.index, one.store, some.data(), 4, 3);
  limbo.erase(&one.index, one.store, more.data(), 1, 8);
  limbo.erase(&one.index, one.store, none.data(), 1, 9);
  CHECK(one.index.size() == 100 && one.store.live() == 103 && limbo.any());
  const Rows& rows = one.store.rows();
  for (size_t i = 0; i < one.keys.size(); ++i) CHECK(((rows.flags(rows.tail(one.slots[i])) & kErased) != 0) == (i < 3));
  limbo.free(one.store, 3);
  CHECK(one.store.live() == 103);
  limbo.free(one.store, 4);
  CHECK(one.store.live() == 101 && limbo.any());
  limbo.free(one.store, std::nullopt);
  CHECK(one.store.live() == 100 && !limbo.any());
}

void where_memory_is_refused_none_is_erased() {
  Table one(many(100));
  CHECK(arrive({one.arriving()}, 1).ok());
  for (int64_t allocations = 0;; ++allocations) {
    CHECK(allocations < 20);
    Limbo limbo;
    if (with_heap_for(allocations, [&] { limbo.erase(&one.index, one.store, one.keys.data(), 50, 1); })) break;
    CHECK(one.has_all() && !limbo.any(), allocations);
  }
  CHECK(one.index.size() == 53);
}

void rows_are_relocated_with_their_keys() {
  Table one(many(100));
  CHECK(arrive({one.arriving()}, 1).ok());
  const Rows& rows = one.store.rows();
  for (size_t i = 0; i < one.keys.size(); ++i) *reinterpret_cast<float*>(rows.weights(one.slots[i])) = float(i);
  leave(&one.index, &one.store, one.keys.data(), 10);  // the lowest slots
  relocate(&one.index, &one.store, one.keys.data() + 93, one.slots.data() + 93, 10);
  CHECK(one.index.size() == 93 && one.store.live() == 93);
  for (size_t i = 10; i < one.keys.size(); ++i) {
    const uint32_t slot = one.index.find(one.keys[i]);
    CHECK(slot < 93 && *reinterpret_cast<const float*>(rows.weights(slot)) == float(i), int64_t(i));
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::keys_come_and_leave();
  shoal::slots_of_erased_rows_wait_for_their_leases();
  shoal::where_memory_is_refused_none_is_erased();
  shoal::rows_are_relocated_with_their_keys();
  shoal::where_memory_is_refused_none_comes();
}
