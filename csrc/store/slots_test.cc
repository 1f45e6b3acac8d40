#include "store/slots.h"

#include <algorithm>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

std::vector<int64_t> range(int64_t from, int64_t to) {
  std::vector<int64_t> keys;
  for (int64_t key = from; key < to; ++key) keys.push_back(key);
  return keys;
}

std::vector<uint32_t> find(const SlotIndex& index, const std::vector<int64_t>& keys) {
  std::vector<uint32_t> slots(keys.size());
  index.find(keys.data(), slots.data(), int64_t(keys.size()));
  return slots;
}

void keys_get_slots_in_place_of_those_they_had() {
  SlotIndex index;
  const std::vector<int64_t> keys = range(-3000, 3000), later = range(1000, 5000);
  std::vector<uint32_t> had(6000);
  CHECK(index.put(keys.data(), 6000, 70, nullptr, had.data()).ok());
  CHECK(index.size() == 6000);
  for (const uint32_t slot : had) CHECK(slot == kNoSlot);
  CHECK(index.put(later.data(), 4000, 10'000, nullptr, had.data()).ok());
  CHECK(index.size() == 8000);
  for (size_t i = 0; i < 4000; ++i) CHECK(had[i] == (i < 2000 ? uint32_t(70 + 4000 + i) : kNoSlot), i);
  const std::vector<uint32_t> slots = find(index, range(-3001, 5001));
  CHECK(slots.front() == kNoSlot && slots.back() == kNoSlot);
  for (int64_t key = -3000; key < 5000; ++key)
    CHECK(slots[size_t(key + 3001)] == uint32_t(key < 1000 ? 70 + key + 3000 : 10'000 + key - 1000), key);
  std::vector<int64_t> all = index.keys();
  std::sort(all.begin(), all.end());
  CHECK(all == range(-3000, 5000));
}

void keys_that_have_moved_on_do_not_get_theirs() {
  SlotIndex index;
  const std::vector<int64_t> keys = range(0, 3000);
  std::vector<uint32_t> had(3000), from(3000);
  CHECK(index.put(keys.data(), 2000, 100, nullptr, had.data()).ok());
  CHECK(index.erase(7) == 107 && index.erase(7) == kNoSlot && index.erase(2500) == kNoSlot);
  // Of a third it is said where they are.
  for (size_t i = 0; i < 3000; ++i) from[i] = uint32_t(i % 3 == 0 ? 100 + i : 50'000);
  CHECK(index.put(keys.data(), 3000, 10'000, from.data(), had.data()).ok());
  CHECK(index.size() == 1999);
  const std::vector<uint32_t> slots = find(index, keys);
  for (uint32_t i = 0; i < 3000; ++i) {
    const uint32_t before = i < 2000 && i != 7 ? 100 + i : kNoSlot;
    const bool got = i % 3 == 0 && before != kNoSlot;
    CHECK(slots[i] == (got ? 10'000 + i : before), i);
    CHECK(had[i] == (got ? before : 10'000 + i), i);
  }
}

void a_key_takes_24_bytes_at_most_at_any_moment() {
  SlotIndex index;
  std::vector<uint32_t> had(2000);
  for (int64_t from = 0; from < 2'400'000; from += 2000) {
    CHECK(index.put(range(from, from + 2000).data(), 2000, uint32_t(from), nullptr, had.data()).ok());
    CHECK(index.size() < 120'000 || index.bytes() <= 24 * index.size(), index.bytes(), index.size());
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::keys_get_slots_in_place_of_those_they_had();
  shoal::keys_that_have_moved_on_do_not_get_theirs();
  shoal::a_key_takes_24_bytes_at_most_at_any_moment();
}
