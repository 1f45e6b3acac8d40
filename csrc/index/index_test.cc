#include "index/index.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <unordered_map>

#include "base/check.h"
#include "base/failing_heap.h"
#include "index/probe.h"

namespace shoal {
namespace {

constexpr uint64_t kDoubleBelow = 16384;  // buckets; below, an index doubles, above it grows by a fifth
constexpr uint64_t kTopHash = ~uint64_t{0};

int64_t key_with_hash(uint64_t hash) { return static_cast<int64_t>(unmix64(hash)); }

// An index, and a map that says what it must hold.
class Walk {
 public:
  Walk(uint64_t seed, std::function<int64_t(Random&)> new_key) : random_(seed), new_key_(std::move(new_key)) {}

  Index index;
  int64_t growths_half_way = 0, shrinks_half_way = 0, shrinks_turned = 0, growths_turned = 0, releases = 0;

  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  Random& random() { return random_; }

  void insert(int64_t n) {
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots;
    while (static_cast<int64_t>(keys.size()) < n) {
      int64_t key = new_key_(random_);
      uint32_t slot = static_cast<uint32_t>(random_.below(kNoSlot));
      if (!truth_.emplace(key, slot).second) continue;
      keys.push_back(key);
      slots.push_back(slot);
      keys_.push_back(key);
    }
    IndexView before = index.view();
    Status status = index.reserve(n);
    CHECK(status.ok(), status.message());
    const IndexView& after = index.view();
    if (half_way(after)) {
      ++growths_half_way;
      // What is still to move never has to wait for a fuller index than this.
      CHECK(static_cast<double>(size()) <= 0.8 * kBucketKeys * static_cast<double>(after.low), size(), after.low);
    }
    if (half_way(before) && shrinking_ && after.frontier < before.frontier) ++shrinks_turned;
    if (after.frontier != before.frontier || after.low != before.low) shrinking_ = false;
    status = index.insert(keys.data(), slots.data(), n);
    CHECK(status.ok(), status.message());
  }

  void erase(int64_t n) {
    for (n = std::min(n, size()); n > 0; --n) {
      size_t which = static_cast<size_t>(random_.below(size()));
      int64_t key = keys_[which];
      keys_[which] = keys_.back();
      keys_.pop_back();
      CHECK(index.erase(key) == truth_.at(key), key);
      truth_.erase(key);
      CHECK(index.find(key) == kNoSlot, key);
      CHECK(index.erase(key) == kNoSlot, key);
    }
  }

  void reassign(int64_t n) {
    for (n = std::min(n, size()); n > 0; --n) {
      int64_t key = keys_[static_cast<size_t>(random_.below(size()))];
      index.reassign(key, truth_[key] = static_cast<uint32_t>(random_.below(kNoSlot)));
    }
  }

  bool shrink(int64_t budget) {
    IndexView before = index.view();
    int64_t bytes = index.bytes();
    bool done = index.shrink(budget);
    const IndexView& after = index.view();
    if (half_way(after) && !done) ++shrinks_half_way;
    if (half_way(before) && !shrinking_ && (after.frontier > before.frontier || after.high < before.high))
      ++growths_turned;
    if (after.frontier != before.frontier || after.high != before.high) shrinking_ = true;
    CHECK(index.bytes() <= bytes, index.bytes(), bytes);
    if (index.bytes() < bytes) ++releases;
    return done;
  }

  void verify() {
    CHECK(index.size() == size(), index.size(), size());
    const IndexView& view = index.view();
    // Every entry once, on the chain from its home; each bucket of a chain counts the keys that passed it.
    std::vector<int64_t> passed(index.extent() + 1, 0);
    int64_t entries = 0;
    for (uint64_t at = 0; at < index.extent(); ++at) {
      CHECK(view.at(at)->used < 1u << kBucketKeys, at);
      index.scan(at, at + 1, [&](int64_t key, uint32_t slot) {
        ++entries;
        auto found = truth_.find(key);
        CHECK(found != truth_.end() && found->second == slot, key, slot, at);
        uint64_t home = home_of(view, index_hash(key));
        CHECK(home <= at && home < view.high, key, home, at, view.high);
        ++passed[home];
        --passed[at];
      });
    }
    CHECK(entries == size(), entries, size());
    int64_t over = 0;
    for (uint64_t at = 0; at < index.extent(); ++at) {
      over += passed[at];
      int64_t counted = view.at(at)->over;
      CHECK(counted == over || counted == UINT16_MAX, at, counted, over);
    }
    CHECK(over == 0);

    std::vector<int64_t> asked = keys_;
    for (int i = 0; i < 1000; ++i) asked.push_back(static_cast<int64_t>(random_.next()));
    for (int64_t key :
         {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()})
      asked.push_back(key);
    check_finds(asked);
  }

  // Index::find and the batched finds of every instruction set give what the map says.
  void check_finds(const std::vector<int64_t>& asked) {
    std::vector<uint32_t> wanted, slots(asked.size());
    std::vector<int32_t> narrow;
    std::vector<uint32_t> narrow_wanted;
    size_t missing = 0, narrow_missing = 0;
    for (int64_t key : asked) {
      auto found = truth_.find(key);
      wanted.push_back(found == truth_.end() ? kNoSlot : found->second);
      missing += wanted.back() == kNoSlot;
      CHECK(index.find(key) == wanted.back(), key, index.find(key), wanted.back());
      if (key < std::numeric_limits<int32_t>::min() || key > std::numeric_limits<int32_t>::max()) continue;
      narrow.push_back(static_cast<int32_t>(key));
      narrow_wanted.push_back(wanted.back());
      narrow_missing += wanted.back() == kNoSlot;
    }
    if (index.extent() == 0) return;  // the batched finds need at least one bucket
    for (const std::string& isa : available_isas()) {
      CHECK(set_isa(isa), isa);
      CHECK(probe().find64(index.view(), asked.data(), asked.size(), slots.data()) == missing, isa);
      CHECK(slots == wanted, isa);
      std::vector<uint32_t> narrow_slots(narrow.size());
      CHECK(probe().find32(index.view(), narrow.data(), narrow.size(), narrow_slots.data()) == narrow_missing, isa);
      CHECK(narrow_slots == narrow_wanted, isa);
    }
  }

  // Inserts and erases in turn until `target` keys are there, with everything else in between.
  void go_to(int64_t target, int64_t largest_step, bool shrinks) {
    bool looked = false;
    while (size() != target) {
      int64_t step = 1 + random_.below(std::min(largest_step, std::abs(target - size())));
      bool back = random_.below(4) == 0;
      if ((size() < target) != back)
        insert(step);
      else
        erase(step);
      if (random_.below(8) == 0) reassign(step);
      if (shrinks && random_.below(3) == 0) shrink(random_.below(2 * step + 1));
      if (half_way(index.view()) && !looked && random_.below(4) == 0) {
        verify();
        looked = true;
      }
    }
    verify();
  }

  void check_empty() {
    CHECK(size() == 0 && index.size() == 0);
    verify();
    for (uint64_t at = 0; at < index.extent(); ++at) {
      const Bucket& bucket = *index.view().at(at);
      CHECK(bucket.used == 0 && (bucket.over == 0 || bucket.over == UINT16_MAX), at, bucket.over);
    }
  }

  static bool half_way(const IndexView& view) { return view.low != view.high; }

 private:
  Random random_;
  std::function<int64_t(Random&)> new_key_;
  std::unordered_map<int64_t, uint32_t> truth_;
  std::vector<int64_t> keys_;
  bool shrinking_ = false;
};

// Small and large, negative and positive.
int64_t mixed_key(Random& random) {
  switch (random.below(4)) {
    case 0: return random.below(1000000);
    case 1: return -random.below(1000000);
    default: return static_cast<int64_t>(random.next());
  }
}

// A key whose home is, at any size, the last bucket, the first, or one of the middle; or any other.
int64_t hostile_key(Random& random) {
  uint64_t near = static_cast<uint64_t>(random.below(1 << 20));
  switch (random.below(4)) {
    case 0: return key_with_hash(kTopHash - near);
    case 1: return key_with_hash(near);
    case 2: return key_with_hash((uint64_t{1} << 63) + near);
    default: return static_cast<int64_t>(random.next());
  }
}

void empty_index_has_nothing() {
  Index index;
  CHECK(index.size() == 0 && index.bytes() == 0 && index.extent() == 0);
  CHECK(index.find(0) == kNoSlot && index.erase(0) == kNoSlot);
  index.reassign(0, 1);
  CHECK(index.shrink(100));
  CHECK(index.reserve(0).ok());
  CHECK(index.insert(nullptr, nullptr, 0).ok());
  CHECK(index.find(0) == kNoSlot && index.shrink(100) && index.size() == 0);
}

void no_key_is_reserved() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> keys = {0, -1, 1, kLeast, kMost, kLeast + 1, kMost - 1, INT32_MIN, INT32_MAX, 1LL << 32};
  Index index;
  for (size_t i = 0; i < keys.size(); ++i) {
    uint32_t slot = static_cast<uint32_t>(i);
    CHECK(index.find(keys[i]) == kNoSlot, keys[i]);
    CHECK(index.reserve(1).ok() && index.insert(&keys[i], &slot, 1).ok());
    for (size_t j = 0; j < keys.size(); ++j) CHECK(index.find(keys[j]) == (j <= i ? j : kNoSlot), keys[j], i);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK(index.erase(keys[i]) == i, keys[i]);
    for (size_t j = 0; j < keys.size(); ++j) CHECK(index.find(keys[j]) == (j > i ? j : kNoSlot), keys[j], i);
  }
}

void agrees_with_a_map_over_a_long_walk() {
  Walk walk(1, mixed_key);
  for (int64_t target : {1, 0, 60, 3, 1000, 200, 0, 20000, 100, 60000, 61000, 0}) walk.go_to(target, 500, true);
  walk.check_empty();
  for (int64_t target : {300000, 70000, 200000, 0}) walk.go_to(target, 8000, true);
  walk.check_empty();
  CHECK(walk.growths_half_way > 10 && walk.shrinks_half_way > 10 && walk.releases > 3, walk.growths_half_way,
        walk.shrinks_half_way, walk.releases);
}

void a_shrink_turns_into_a_growth_and_back() {
  Walk walk(2, mixed_key);
  walk.go_to(200000, 20000, false);
  while (Walk::half_way(walk.index.view())) walk.insert(100);
  walk.erase(walk.size() - 60000);
  for (int round = 0; round < 6; ++round) {
    // Half of the shrink, then keys until it has to go back up, then erases until it goes on down.
    CHECK(!walk.shrink(6000), round);
    walk.verify();
    int64_t turned = walk.shrinks_turned;
    for (int i = 0; i < 200 && walk.shrinks_turned == turned; ++i) walk.insert(200);
    CHECK(walk.shrinks_turned > turned, round);
    walk.verify();
    walk.erase(walk.size() - 60000);
  }
  CHECK(walk.growths_turned > 0, walk.growths_turned);
  while (!walk.shrink(1000)) {
  }
  walk.verify();
  walk.erase(walk.size());
  walk.check_empty();
}

void a_shrink_without_a_budget_does_nothing() {
  Walk walk(3, mixed_key);
  walk.go_to(250000, 20000, false);
  while (Walk::half_way(walk.index.view())) walk.insert(100);
  walk.erase(walk.size() - 60000);
  for (int64_t budget : {0, -5}) {
    CHECK(!walk.shrink(budget), budget);
    walk.verify();
  }
  // A growth that starts from here finds every key where it was.
  for (int i = 0; i < 200; ++i) {
    walk.insert(100);
    if (i % 20 == 0) walk.verify();
  }
  walk.erase(walk.size() - 60000);
  CHECK(!walk.shrink(1));
  CHECK(!walk.shrink(0));
  for (int i = 0; i < 200; ++i) walk.insert(100);
  walk.verify();
  walk.erase(walk.size() - 10);
  while (!walk.shrink(100000)) {
  }
  CHECK(walk.shrink(0));
}

void grows_by_a_fifth_and_a_little_at_a_time() {
  Walk walk(4, mixed_key);
  constexpr int64_t kStep = 512;
  bool half_way = false;
  while (walk.size() < 300000) {
    IndexView before = walk.index.view();
    int64_t bytes = walk.index.bytes(), bytes_after = walk.index.bytes_after(kStep);
    walk.insert(kStep);
    IndexView after = walk.index.view();
    // A few buckets after the last one take the overflow.
    constexpr int64_t kSpill = 64 * sizeof(Bucket);
    CHECK(walk.index.bytes() <= bytes_after + kSpill, walk.size(), walk.index.bytes(), bytes_after);
    CHECK(static_cast<double>(walk.size()) <= 0.8 * kBucketKeys * static_cast<double>(after.low), walk.size(),
          after.low);
    if (before.low < kDoubleBelow) continue;
    CHECK(walk.index.bytes() - bytes <= bytes / 5 + kSpill, walk.size(), walk.index.bytes(), bytes);
    CHECK(walk.index.bytes() - bytes <= 0 || before.low == before.high || walk.index.bytes() - bytes <= kSpill);
    // Work is bounded by the keys that came: buckets looked at, seen by how far the frontier went.
    if (before.low == before.high) before.frontier = kTopHash;
    uint64_t frontier = before.low == after.low ? after.frontier : 0;
    if (before.low == before.high && after.low == after.high) continue;
    uint64_t moved = scaled(before.frontier, before.low) - scaled(frontier, before.low);
    CHECK(moved <= 3 * kStep + 2 * 64, walk.size(), moved);
    half_way = true;
  }
  CHECK(half_way);
  walk.verify();
  CHECK(walk.index.bytes() <= 22 * walk.size(), walk.index.bytes(), walk.size());
}

void bytes_fall_after_erases() {
  Walk walk(5, mixed_key);
  walk.go_to(250000, 20000, false);
  // From half of a growth: going back is only the first part of the way.
  while (!Walk::half_way(walk.index.view())) walk.insert(100);
  int64_t full = walk.index.bytes();
  walk.erase(walk.size() - 10000);
  int calls = 0;
  while (!walk.shrink(2000)) ++calls;
  CHECK(calls > 10, calls);
  CHECK(walk.index.bytes() < full / 10, walk.index.bytes(), full);
  walk.verify();
  walk.erase(walk.size());
  while (!walk.shrink(2000)) {
  }
  CHECK(walk.index.bytes() < 64 * 64, walk.index.bytes());
  walk.check_empty();
  walk.go_to(20000, 1000, false);
}

void hostile_keys_are_found_and_leave_no_trace() {
  Walk walk(6, hostile_key);
  for (int64_t target : {40, 0, 2000, 500, 12000, 3000, 9000, 0}) walk.go_to(target, 400, true);
  walk.check_empty();
  while (!walk.shrink(1000)) {
  }
  CHECK(walk.index.bytes() < 64 * 64, walk.index.bytes());
}

void keys_at_the_boundaries_of_buckets_stay_in_reach() {
  const Index* of = nullptr;
  Walk walk(10, [&](Random& random) {
    if (random.below(3) == 0) return mixed_key(random);  // there are only so many of the others
    if (random.below(50) == 0) return key_with_hash(kTopHash - static_cast<uint64_t>(random.below(6)));
    // The smallest hash of a bucket, or one next to it, at the scale before or after a growth or shrink.
    uint64_t scale = std::max<uint64_t>(random.below(2) ? of->view().low : of->view().high, 1);
    unsigned __int128 begin = static_cast<unsigned __int128>(random.below(static_cast<int64_t>(scale))) << 64;
    uint64_t first = static_cast<uint64_t>((begin + scale - 1) / scale);
    return key_with_hash(first + static_cast<uint64_t>(random.below(7)) - 3);
  });
  of = &walk.index;
  for (int64_t target : {40, 0, 3000, 0, 100000, 60000, 110000, 500, 20000, 0}) walk.go_to(target, 1500, true);
  walk.check_empty();
}

void overflow_runs_into_the_next_chunk() {
  int64_t hostile = 0;
  Walk walk(7, [&](Random& random) {
    return hostile > 0 ? key_with_hash(kTopHash - static_cast<uint64_t>(hostile--)) : mixed_key(random);
  });
  // A shrink sizes an index freely: here so that its spill ends with its first chunk.
  walk.go_to(300000, 50000, false);
  constexpr int64_t kSpillBuckets = 256;
  walk.erase(300000 - (static_cast<int64_t>(kChunkBuckets) - kSpillBuckets - 10) * 13 / 4);
  while (!walk.shrink(100000)) {
  }
  CHECK(walk.index.view().high + kSpillBuckets < kChunkBuckets, walk.index.view().high);
  CHECK(walk.index.extent() < kChunkBuckets);
  hostile = 2500;
  walk.insert(2500);
  CHECK(walk.index.view().high + kSpillBuckets < kChunkBuckets && walk.index.extent() > kChunkBuckets,
        walk.index.extent());
  walk.verify();
  walk.insert(30000);  // grows past them
  walk.verify();
  walk.go_to(20000, 5000, true);
  walk.erase(walk.size());
  walk.check_empty();
}

void a_chain_of_more_keys_than_a_bucket_can_count() {
  constexpr int64_t kKeys = 66500;
  constexpr uint64_t kMiddle = uint64_t{1} << 63;
  int64_t next = 0;
  Walk walk(8, [&](Random&) { return key_with_hash(kMiddle + static_cast<uint64_t>(next++)); });
  walk.insert(kKeys);  // reserves first, so that no growth moves them
  const IndexView& view = walk.index.view();
  uint64_t home = home_of(view, kMiddle);
  CHECK(view.at(home)->over == UINT16_MAX, view.at(home)->over);
  CHECK(walk.index.find(key_with_hash(kMiddle + 3)) != kNoSlot);
  CHECK(walk.index.find(key_with_hash(kMiddle + kKeys - 1)) != kNoSlot);
  CHECK(walk.index.find(key_with_hash(kMiddle + kKeys)) == kNoSlot);
  // The counter no longer knows how many keys passed, so it stays; keys after it must stay in reach.
  CHECK(walk.index.erase(key_with_hash(kMiddle)) != kNoSlot);
  CHECK(view.at(home)->over == UINT16_MAX);
  for (int64_t i = 1; i < kKeys; i += 97)
    CHECK(walk.index.find(key_with_hash(kMiddle + static_cast<uint64_t>(i))) != kNoSlot, i);
}

void no_key_is_lost_where_the_heap_ends() {
  auto any = [](Random& random) { return static_cast<int64_t>(random.next()); };
  // From nothing, by doubling, and by a fifth with moves half way: every allocation of a growth is refused once.
  for (auto [keys, more] : {std::pair<int64_t, int64_t>{0, 100}, {1000, 50000}, {70000, 60000}}) {
    bool grew = false;
    for (int64_t allocations = 0; !grew; ++allocations) {
      Walk walk(9, any);
      if (keys) walk.insert(keys);
      Status status;
      bool threw = !with_heap_for(allocations, [&, n = more] { status = walk.index.reserve(n); });
      CHECK(!threw, keys, allocations);
      CHECK(status.ok() || status.code() == Code::memory, keys, allocations);
      grew = status.ok();
      walk.verify();
      walk.insert(more);
      walk.verify();
      CHECK(allocations < 1000, keys);
    }
  }
}

// Keys of one home, whose chain runs on beyond the buckets that a growth moves first.
void a_long_chain_is_whole_where_the_heap_ends() {
  constexpr int64_t kKeys = 448;
  bool grew = false;
  for (int64_t allocations = 0; !grew; ++allocations) {
    Index index;
    CHECK(index.reserve(kKeys).ok());
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots;
    for (int64_t i = 0; i < kKeys; ++i) {
      keys.push_back(static_cast<int64_t>(unmix64((uint64_t{1} << 63) + 2 * static_cast<uint64_t>(i))));
      slots.push_back(static_cast<uint32_t>(i));
    }
    CHECK(index.insert(keys.data(), slots.data(), kKeys).ok());
    Status status;
    CHECK(with_heap_for(allocations, [&] { status = index.reserve(1); }), allocations);
    grew = status.ok();
    for (size_t i = 0; i < keys.size(); ++i) CHECK(index.find(keys[i]) == slots[i], allocations, i);
    for (size_t i = 0; i < keys.size(); ++i) CHECK(index.erase(keys[i]) == slots[i], allocations, i);
    CHECK(index.size() == 0 && allocations < 100, allocations);
  }
}

void a_shrink_without_memory_loses_nothing_and_can_turn_around() {
  auto any = [](Random& random) { return static_cast<int64_t>(random.next()); };
  for (int64_t allocations : {0, 1, 2, 4, 8}) {
    Walk walk(10, any);
    CHECK(walk.index.reserve(200000).ok());  // at once: nothing has moved, so no list has room
    walk.insert(20000);
    CHECK(with_heap_for(allocations, [&] { walk.index.shrink(3000); }), allocations);
    walk.verify();
    walk.insert(300000);
    walk.verify();
  }
}

#if !SHOAL_SANITIZED
void no_key_is_lost_where_memory_ends() {
  constexpr size_t kMiB = size_t{1} << 20;
  for (size_t extra = 0; extra < 40; extra += 4) {
    Walk walk(9, mixed_key);
    CHECK(walk.index.reserve(1800000).ok());
    walk.insert(20000);
    Status status;
    with_memory_limit(extra * kMiB + kMiB / 2, [&] { status = walk.index.reserve(5000000); });
    CHECK(status.code() == Code::memory, extra, status.message());
    walk.verify();
    walk.insert(20000);
    walk.verify();
  }
}

// Keys that all overflow from the last bucket, so that an insert, or a growth's moves, must map memory on their way.
struct TopKeys {
  std::vector<int64_t> keys;
  std::vector<uint32_t> slots;

  explicit TopKeys(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      keys.push_back(key_with_hash(kTopHash - static_cast<uint64_t>(i)));
      slots.push_back(static_cast<uint32_t>(i));
    }
  }
  Status insert(Index& index, int64_t from, int64_t to) const {
    return index.insert(keys.data() + from, slots.data() + from, to - from);
  }
  void check(const Index& index, int64_t there) const {
    CHECK(index.size() == there, index.size(), there);
    for (size_t i = 0; i < keys.size(); ++i)
      CHECK(index.find(keys[i]) == (static_cast<int64_t>(i) < there ? i : kNoSlot), i, there);
    CHECK(index.view().at(index.view().high - 1)->over == there - kBucketKeys, there);
  }
};

void an_insert_that_memory_ends_inserts_nothing() {
  constexpr int64_t kKeys = 25000, kBefore = 1000;
  TopKeys top(kKeys);
  Index index;
  CHECK(index.reserve(90000).ok());
  CHECK(index.view().high < kChunkBuckets && index.view().high + kKeys / kBucketKeys > kChunkBuckets);
  CHECK(top.insert(index, 0, kBefore).ok());
  Status status;
  with_memory_limit(1 << 20, [&] { status = top.insert(index, kBefore, kKeys); });
  CHECK(status.code() == Code::memory, status.message());
  top.check(index, kBefore);
  CHECK(top.insert(index, kBefore, kKeys).ok());
  top.check(index, kKeys);
}

void a_growth_that_memory_ends_can_go_on_later() {
  constexpr int64_t kKeys = 23000, kWanted = 85000;
  TopKeys top(kKeys);
  Index index;
  CHECK(index.reserve(75000).ok());
  CHECK(top.insert(index, 0, kKeys).ok());
  CHECK(index.extent() < kChunkBuckets, index.extent());
  Status status;
  with_memory_limit(1 << 20, [&] { status = index.reserve(kWanted - kKeys); });
  CHECK(status.code() == Code::memory && Walk::half_way(index.view()), status.message());
  for (int64_t i = 0; i < kKeys; ++i) CHECK(index.find(top.keys[static_cast<size_t>(i)]) == i, i);
  CHECK(index.reserve(kWanted - kKeys).ok());
  CHECK(!Walk::half_way(index.view()) && index.extent() > kChunkBuckets, index.extent());
  top.check(index, kKeys);
}
#endif

}  // namespace
}  // namespace shoal

int main() {
  shoal::empty_index_has_nothing();
  shoal::no_key_is_reserved();
  shoal::agrees_with_a_map_over_a_long_walk();
  shoal::a_shrink_turns_into_a_growth_and_back();
  shoal::a_shrink_without_a_budget_does_nothing();
  shoal::grows_by_a_fifth_and_a_little_at_a_time();
  shoal::bytes_fall_after_erases();
  shoal::hostile_keys_are_found_and_leave_no_trace();
  shoal::keys_at_the_boundaries_of_buckets_stay_in_reach();
  shoal::overflow_runs_into_the_next_chunk();
  shoal::a_chain_of_more_keys_than_a_bucket_can_count();
  shoal::no_key_is_lost_where_the_heap_ends();
  shoal::a_long_chain_is_whole_where_the_heap_ends();
  shoal::a_shrink_without_memory_loses_nothing_and_can_turn_around();
#if !SHOAL_SANITIZED
  shoal::no_key_is_lost_where_memory_ends();
  shoal::an_insert_that_memory_ends_inserts_nothing();
  shoal::a_growth_that_memory_ends_can_go_on_later();
#endif
}
