#include "store/slots.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/failing_heap.h"
#include "base/hash.h"

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

void check_bytes(const SlotIndex& index) {
  const int64_t beside = index.bytes() > int64_t{32} << 20 ? int64_t{4} << 20 : int64_t{64} << 10;
  CHECK(index.bytes() <= 24 * index.size() + beside, index.bytes(), index.size());
}

void memory_follows_the_keys_down() {
  SlotIndex index;
  std::vector<int64_t> keys = range(0, 1'700'000);
  std::vector<uint32_t> had(keys.size());
  CHECK(index.put(keys.data(), int64_t(keys.size()), 0, nullptr, had.data()).ok());
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(5));
  while (!keys.empty()) {
    CHECK(index.erase(keys.back()) == uint32_t(keys.back()));
    keys.pop_back();
    if (keys.size() % 1000 == 0) check_bytes(index);
    if (keys.size() % 400'000 == 7) {
      const std::vector<uint32_t> slots = find(index, keys);
      for (size_t i = 0; i < keys.size(); ++i) CHECK(slots[i] == uint32_t(keys[i]), i);
      CHECK(index.keys().size() == keys.size());
    }
  }
  CHECK(index.size() == 0 && index.bytes() < 24'000, index.bytes());
}

void memory_follows_the_keys_up_and_down() {
  constexpr int64_t kKeys = 300'000;
  SlotIndex index;
  std::vector<uint32_t> wanted(kKeys, kNoSlot);
  std::mt19937_64 random(7);
  const auto key_of_number = [](int64_t number) { return number * 977 - 20'000'000; };
  uint32_t slot = 0;
  int64_t in = 0;
  for (int round = 0; round < 16; ++round) {
    const bool up = round % 2 == 0;
    const int64_t until = (up ? kKeys / 2 : kKeys / 4) + int64_t(random() % (kKeys / 4));
    // Some go the other way: parts are split and merged in the same round.
    while (up ? in < until : in > until) {
      const int64_t first = int64_t(random() % (kKeys - 1000));
      std::vector<int64_t> keys;
      for (int64_t i = first; i < first + (up ? 1000 : 200); ++i) keys.push_back(key_of_number(i));
      std::vector<uint32_t> had(keys.size());
      CHECK(index.put(keys.data(), int64_t(keys.size()), slot, nullptr, had.data()).ok());
      for (size_t i = 0; i < keys.size(); ++i) {
        uint32_t& now = wanted[size_t(first) + i];
        CHECK(had[i] == now, i);
        in += now == kNoSlot;
        now = slot++;
      }
      for (int i = 0; i < (up ? 100 : 1000); ++i) {
        const int64_t number = int64_t(random() % kKeys);
        CHECK(index.erase(key_of_number(number)) == wanted[size_t(number)], number);
        in -= wanted[size_t(number)] != kNoSlot;
        wanted[size_t(number)] = kNoSlot;
      }
      check_bytes(index);
    }
    std::vector<int64_t> all;
    for (int64_t i = 0; i < kKeys; ++i) all.push_back(key_of_number(i));
    CHECK(index.size() == in && find(index, all) == wanted, round);
  }
}

void erasing_needs_no_heap() {
  SlotIndex index;
  const std::vector<int64_t> keys = range(0, 100'000);
  std::vector<uint32_t> had(keys.size());
  CHECK(index.put(keys.data(), 100'000, 0, nullptr, had.data()).ok());
  CHECK(with_heap_for(0, [&] {
    for (int64_t key = 0; key < 90'000; ++key) CHECK(index.erase(key) == uint32_t(key), key);
  }));
  check_bytes(index);
  const std::vector<uint32_t> slots = find(index, keys);
  for (uint32_t i = 0; i < 100'000; ++i) CHECK(slots[i] == (i < 90'000 ? kNoSlot : i), i);
}

void what_is_erased_and_put_again_is_found() {
  SlotIndex index;
  std::map<int64_t, uint32_t> wanted;
  std::mt19937_64 random(3);
  uint32_t slot = 0;
  for (int round = 0; round < 60; ++round) {
    std::map<int64_t, bool> some;
    while (some.size() < 3000) some[int64_t(random() % 60'000) * 977 - 20'000'000];
    std::vector<int64_t> keys;
    for (const auto& [key, _] : some) keys.push_back(key);
    std::vector<uint32_t> had(keys.size());
    CHECK(index.put(keys.data(), int64_t(keys.size()), slot, nullptr, had.data()).ok());
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto there = wanted.find(keys[i]);
      CHECK(had[i] == (there == wanted.end() ? kNoSlot : there->second), i);
      wanted[keys[i]] = slot++;
    }
    for (size_t i = 0; i < 2000; ++i) {
      const int64_t key = int64_t(random() % 60'000) * 977 - 20'000'000;
      const auto there = wanted.find(key);
      CHECK(index.erase(key) == (there == wanted.end() ? kNoSlot : there->second), key);
      wanted.erase(key);
    }
  }
  CHECK(index.size() == int64_t(wanted.size()));
  std::vector<int64_t> all;
  for (int64_t i = 0; i < 60'000; ++i) all.push_back(i * 977 - 20'000'000);
  const std::vector<uint32_t> slots = find(index, all);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto there = wanted.find(all[i]);
    CHECK(slots[i] == (there == wanted.end() ? kNoSlot : there->second), i);
  }
}

// The key that has this hash.
int64_t key_of(uint64_t hash) {
  const auto inverse = [](uint64_t odd) {
    uint64_t found = odd;
    for (int i = 0; i < 6; ++i) found *= 2 - odd * found;
    return found;
  };
  hash = (hash ^ (hash >> 33)) * inverse(0xc4ceb9fe1a85ec53ULL);
  hash = (hash ^ (hash >> 33)) * inverse(0xff51afd7ed558ccdULL);
  return int64_t(hash ^ (hash >> 33));
}

void keys_made_to_have_hashes_alike_are_refused_and_harm_nobody() {
  CHECK(mix64(uint64_t(key_of(12345))) == 12345);
  SlotIndex index;
  std::vector<int64_t> alike;
  for (uint64_t i = 0; i < 6000; ++i) alike.push_back(key_of(0x123456789abc0000ULL + i));
  std::vector<uint32_t> had(6000);
  const std::vector<int64_t> others = range(0, 6000);
  CHECK(index.put(others.data(), 6000, 0, nullptr, had.data()).ok());
  CHECK(index.put(alike.data(), 6000, 10'000, nullptr, had.data()).code() == Code::capacity);
  const std::vector<uint32_t> slots = find(index, alike);
  int64_t in = 0;
  for (uint32_t i = 0; i < 6000; ++i) {
    CHECK(slots[i] == (had[i] == kNoSlot ? 10'000 + i : kNoSlot), i);
    in += slots[i] != kNoSlot;
  }
  CHECK(in > 2000 && index.size() == 6000 + in, in);
  // The same place in all parts, and many of them passed on.
  std::vector<int64_t> crowded;
  for (uint64_t i = 1; i <= 2000; ++i) crowded.push_back(key_of(i * 0x9e3779b97f4a7c15ULL << 9));
  CHECK(index.put(crowded.data(), 2000, 20'000, nullptr, had.data()).ok());
  for (size_t i = 0; i < 2000; i += 2) CHECK(index.erase(crowded[i]) == 20'000 + i, i);
  const std::vector<uint32_t> left = find(index, crowded);
  for (uint32_t i = 0; i < 2000; ++i) CHECK(left[i] == (i % 2 ? 20'000 + i : kNoSlot), i);
  for (int64_t i = 0; i < in; ++i) CHECK(index.erase(alike[size_t(i)]) == 10'000 + i, i);
  const std::vector<uint32_t> there = find(index, others);
  for (uint32_t i = 0; i < 6000; ++i) CHECK(there[i] == i, i);
}

void where_the_heap_ends_nothing_is_lost() {
  for (int64_t allocations = 0; allocations < 200; ++allocations) {
    SlotIndex index;
    const std::vector<int64_t> keys = range(0, 90'000);
    std::vector<uint32_t> had(keys.size());
    Status status;
    // Fewer than would wake a thread at a time: this one's heap ends.
    with_heap_for(allocations, [&] {
      for (int64_t from = 0; from < 90'000 && status.ok(); from += 1000)
        status = index.put(keys.data() + from, 1000, uint32_t(from), nullptr, had.data() + from);
    });
    CHECK(status.ok() || status.code() == Code::memory);
    for (int64_t from = 0; from < 90'000; from += 1000)
      CHECK(index.put(keys.data() + from, 1000, uint32_t(from), nullptr, had.data()).ok());
    CHECK(index.size() == 90'000);
    const std::vector<uint32_t> slots = find(index, keys);
    for (uint32_t i = 0; i < 90'000; ++i) CHECK(slots[i] == i, i);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::keys_get_slots_in_place_of_those_they_had();
  shoal::keys_that_have_moved_on_do_not_get_theirs();
  shoal::a_key_takes_24_bytes_at_most_at_any_moment();
  shoal::memory_follows_the_keys_down();
  shoal::memory_follows_the_keys_up_and_down();
  shoal::erasing_needs_no_heap();
  shoal::what_is_erased_and_put_again_is_found();
  shoal::keys_made_to_have_hashes_alike_are_refused_and_harm_nobody();
  shoal::where_the_heap_ends_nothing_is_lost();
}
