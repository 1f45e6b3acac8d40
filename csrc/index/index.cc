#include "index/index.h"

#include <algorithm>
#include <new>

#include "base/page_stock.h"

namespace shoal {

static_assert(kChunkBuckets * sizeof(Bucket) == kHugePage);

// At a load of 0.75 a bucket of five overflows for one key in ten. A growth starts at kGrowAt and ends before kFull.
static constexpr double kGrowAt = 0.70;
static constexpr double kFull = 0.80;
static constexpr double kFresh = 0.65;
static constexpr double kShrinkAt = 0.30;
static constexpr uint64_t kMinBuckets = 16;
// Below this an index is a few hundred kilobytes, and doubling it costs less than growing it finely.
static constexpr uint64_t kDoubleBelow = 16384;
// From here on a chunk is an eighth of the index at most, and comes as a huge page although not all of it is in use.
static constexpr uint64_t kWholeFromChunk = 8;
// Overflow of the last buckets goes into these, which follow them.
static constexpr uint64_t kSpillBuckets = 256;
// (kFull - kGrowAt) x 5 keys a bucket must pay for moving every bucket once.
static constexpr int64_t kMovesPerKey = 2;
// Buckets moved at a time: their entries fit into the first-level cache, and the frontier's division is paid once.
static constexpr uint64_t kBatch = 64;

static double room(uint64_t buckets, double load) { return static_cast<double>(buckets) * kBucketKeys * load; }

static uint64_t grown(uint64_t buckets) { return buckets < kDoubleBelow ? 2 * buckets : buckets + buckets / 5; }

// Returns the smallest hash whose home at this scale is `bucket`, or the largest frontier if there is none.
static uint64_t first_hash(uint64_t bucket, uint64_t scale) {
  if (bucket >= scale) return ~uint64_t{0};
  unsigned __int128 numerator = static_cast<unsigned __int128>(bucket) << 64;
  return static_cast<uint64_t>((numerator + scale - 1) / scale);
}

uint32_t* Index::locate(int64_t key) const {
  if (!extent_) return nullptr;
  for (uint64_t at = home_of(view_, index_hash(key));; ++at) {
    Bucket& bucket = *view_.at(at);
    for (uint32_t used = bucket.used; used; used &= used - 1) {
      int i = __builtin_ctz(used);
      if (bucket.keys[i] == key) return &bucket.slots[i];
    }
    if (bucket.over == 0) return nullptr;
  }
}

uint32_t Index::find(int64_t key) const {
  const uint32_t* slot = locate(key);
  return slot ? *slot : kNoSlot;
}

void Index::reassign(int64_t key, uint32_t slot) {
  if (uint32_t* at = locate(key)) *at = slot;
}

int64_t Index::bytes_of(uint64_t buckets) {
  if (buckets > kWholeFromChunk * kChunkBuckets)
    buckets = (buckets + kChunkBuckets - 1) / kChunkBuckets * kChunkBuckets;
  return static_cast<int64_t>(buckets * sizeof(Bucket));
}

int64_t Index::bytes_after(int64_t more) const {
  uint64_t buckets = std::max(view_.high, kMinBuckets);
  while (static_cast<double>(size_ + more) > room(buckets, kGrowAt)) buckets = grown(buckets);
  return bytes_of(std::max(buckets, extent_));
}

Status Index::map_chunks(uint64_t buckets) {
  // Both lists get room first. Otherwise one could be longer than the other, and the view could point to an old one.
  const size_t wanted = static_cast<size_t>((buckets + kChunkBuckets - 1) / kChunkBuckets);
  try {
    pages_.reserve(wanted);
    chunks_.reserve(wanted);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
  view_.chunks = chunks_.data();
  while (pages_.size() * kChunkBuckets < buckets) {
    Pages pages;
    bool whole = (pages_.size() + 1) * kChunkBuckets <= buckets || pages_.size() >= kWholeFromChunk;
    Status status = whole ? PageStock::instance().take(&pages) : Pages::map(kHugePage, &pages);
    if (!status.ok()) return status;
    chunks_.push_back(reinterpret_cast<Bucket*>(pages.data()));
    pages_.push_back(std::move(pages));
  }
  return {};
}

// Puts buckets [0, buckets) into use. A chunk goes onto huge pages once all of it is in use, so that a small index, and
// the last chunk of a large one, take no more memory than they need.
Status Index::extend(uint64_t buckets) {
  if (buckets <= extent_) return {};
  if (Status status = map_chunks(buckets); !status.ok()) return status;
  for (uint64_t chunk = 0; (chunk + 1) * kChunkBuckets <= buckets; ++chunk) {
    if (chunk * kChunkBuckets >= extent_)
      pages_[chunk].advise_huge();
    else
      pages_[chunk].collapse();
  }
  // Hashes fall everywhere, so all of it will be touched at once.
  for (uint64_t chunk = extent_ / kChunkBuckets; chunk * kChunkBuckets < buckets; ++chunk) {
    uint64_t begin = chunk * kChunkBuckets;
    pages_[chunk].populate((std::max(begin, extent_) - begin) * sizeof(Bucket), (buckets - begin) * sizeof(Bucket));
  }
  extent_ = buckets;
  return {};
}

// Puts a key into the first bucket from `at` on that has room, and returns that bucket; extent_ if none has room.
SHOAL_INLINE uint64_t Index::put(uint64_t at, int64_t key, uint32_t slot) {
  for (; at < extent_; ++at) {
    Bucket& bucket = *view_.at(at);
    uint32_t free = ~uint32_t{bucket.used} & ((1u << kBucketKeys) - 1);
    if (!free) {
      if (bucket.over != UINT16_MAX) ++bucket.over;
      continue;
    }
    int i = __builtin_ctz(free);
    bucket.keys[i] = key;
    bucket.slots[i] = slot;
    bucket.used |= static_cast<uint8_t>(1u << i);
    break;
  }
  return at;
}

// Adds a bucket for a key that found no room from its home to the last bucket.
Status Index::put_into_new(uint64_t home, int64_t key, uint32_t slot) {
  const uint64_t at = extent_;
  if (Status status = extend(at + 1); !status.ok()) {
    uncount(home, at);
    return status;
  }
  put(at, key, slot);
  return {};
}

// Returns false if that needs one more bucket and there is no memory for it: `status` says so. A Status for each key
// would cost an insert a tenth of its time.
SHOAL_INLINE bool Index::place(uint64_t home, int64_t key, uint32_t slot, Status* status) {
  if (put(home, key, slot) < extent_) return true;
  *status = put_into_new(home, key, slot);
  return status->ok();
}

void Index::take_out(uint64_t home, uint64_t at, int which) {
  view_.at(at)->used &= static_cast<uint8_t>(~(1u << which));
  uncount(home, at);
}

// Takes back what a key with this home added to `over` on its way to `at`.
void Index::uncount(uint64_t home, uint64_t at) {
  for (uint64_t passed = home; passed < at; ++passed)
    if (uint16_t& over = view_.at(passed)->over; over != UINT16_MAX) --over;
}

Status Index::insert(const int64_t* keys, const uint32_t* slots, int64_t n) {
  constexpr int64_t kAhead = 16;
  uint64_t homes[kAhead];
  Status status;
  for (int64_t i = 0; i < n + kAhead; ++i) {
    if (i >= kAhead) {
      int64_t j = i - kAhead;
      if (!place(homes[j % kAhead], keys[j], slots[j], &status)) {
        for (int64_t placed = 0; placed < j; ++placed) erase(keys[placed]);
        return status;
      }
      ++size_;
    }
    if (i < n) {
      homes[i % kAhead] = home_of(view_, index_hash(keys[i]));
      __builtin_prefetch(view_.at(homes[i % kAhead]));
    }
  }
  return {};
}

uint32_t Index::erase(int64_t key) {
  if (!extent_) return kNoSlot;
  uint64_t home = home_of(view_, index_hash(key));
  for (uint64_t at = home;; ++at) {
    Bucket& bucket = *view_.at(at);
    for (uint32_t used = bucket.used; used; used &= used - 1) {
      int i = __builtin_ctz(used);
      if (bucket.keys[i] != key) continue;
      uint32_t slot = bucket.slots[i];
      take_out(home, at, i);
      --size_;
      return slot;
    }
    if (bucket.over == 0) return kNoSlot;
  }
}

// Takes all entries out of buckets [from, to). REQUIRES: no other key has passed through one of them.
void Index::empty(uint64_t from, uint64_t to) {
  const size_t before = moving_.size();
  moving_.resize(before + (to - from) * kBucketKeys);
  Moving* out = moving_.data() + before;
  for (uint64_t at = from; at < to; ++at) {
    Bucket& bucket = *view_.at(at);
    // A branch for each entry would go wrong once a bucket.
    for (int i = 0; i < kBucketKeys; ++i) {
      *out = {bucket.keys[i], index_hash(bucket.keys[i]), bucket.slots[i]};
      out += bucket.used >> i & 1;
    }
    bucket.used = 0;
    bucket.over = 0;
  }
  moving_.resize(static_cast<size_t>(out - moving_.data()));
}

// Takes out every entry whose home, at `scale`, is in [from, to). Returns false if there is no memory for the list;
// then the entries are unchanged.
bool Index::collect(uint64_t scale, uint64_t from, uint64_t to) {
  moving_.clear();
  const bool low = scale == view_.low;
  // Where the growth has not moved entries yet, and starting at a bucket that received no overflow, all entries up to
  // `to` are taken out.
  const bool apart = low && scaled(view_.frontier, view_.high) >= to;
  bool passed = from > 0 && view_.at(from - 1)->over != 0;
  uint64_t emptied = to;  // from here to `to` nothing is left to count back
  try {
    for (uint64_t at = from; at < extent_; ++at) {
      if (apart && !passed && at < to) {
        passed = view_.at(to - 1)->over != 0;
        uint64_t end = to;  // of the buckets that hold keys which were passed on beyond `to`
        for (bool on = passed; on && end < extent_; ++end) on = view_.at(end)->over != 0;
        // Room for all of them now: `empty` clears the counts by which those beyond `to` are found.
        moving_.reserve(moving_.size() + (end - at) * kBucketKeys);
        empty(at, to);
        if (!passed) break;
        emptied = at;
        at = to;
      }
      Bucket& here = *view_.at(at);
      for (uint32_t used = here.used; used; used &= used - 1) {
        int i = __builtin_ctz(used);
        uint64_t hash = index_hash(here.keys[i]);
        uint64_t home = scaled(hash, scale);
        if ((hash < view_.frontier) != low || home < from || home >= to) continue;
        moving_.push_back({here.keys[i], hash, here.slots[i]});
        take_out(home < emptied ? home : to, at, i);
      }
      passed = here.over != 0;
      if (at + 1 >= to && !passed) break;
    }
  } catch (const std::bad_alloc&) {
    resettle();
    return false;
  }
  return true;
}

// Puts the entries that were taken out where they belong now: to their old buckets, if the frontier has not moved.
// REQUIRES: memory is mapped for all of it, as it is on the way back and towards the start.
void Index::resettle() {
  Status status;
  for (const Moving& entry : moving_)
    if (!place(home_of(view_, entry.hash), entry.key, entry.slot, &status)) __builtin_unreachable();
}

Status Index::begin_growth(uint64_t buckets) {
  // The spill is mapped now, where a refusal costs nothing.
  if (Status status = map_chunks(buckets + kSpillBuckets); !status.ok()) return status;
  if (Status status = extend(buckets); !status.ok()) return status;
  view_.high = buckets;
  view_.frontier = ~uint64_t{0};
  if (view_.low == 0) view_.low = view_.high;
  return {};
}

// Moves at least `count` buckets from low scale to high scale, from the end of the array towards its start.
Status Index::grow(uint64_t count) {
  for (uint64_t done = 0; !settled() && done < count; done += kBatch) {
    uint64_t end = scaled(view_.frontier - 1, view_.low) + 1;
    uint64_t begin = end > kBatch ? end - kBatch : 0;
    if (!collect(view_.low, begin, end)) return out_of_memory();
    // There must be room for all of them after the last bucket; otherwise they go back to where they were.
    Status room = map_chunks(extent_ + moving_.size() / kBucketKeys + 1);
    if (room.ok()) view_.frontier = first_hash(begin, view_.low);
    resettle();
    if (!room.ok()) return room;
    if (begin == 0) view_.low = view_.high;
  }
  return {};
}

Status Index::reserve(int64_t more) {
  double need = static_cast<double>(size_ + more);
  if (view_.high == 0) {
    uint64_t buckets = kMinBuckets;
    while (need > room(buckets, kGrowAt)) buckets = grown(buckets);
    return begin_growth(buckets);
  }
  for (;;) {
    if (need <= room(view_.low, kGrowAt)) return {};
    if (settled()) {
      uint64_t buckets = grown(view_.low);
      // A small index grows to the size it needs at once: its memory does not matter, but its moves do.
      while (buckets < kDoubleBelow && need > room(buckets, kGrowAt)) buckets = grown(buckets);
      if (Status status = begin_growth(buckets); !status.ok()) return status;
    }
    bool at_once = view_.low < kDoubleBelow || need > room(view_.low, kFull);
    if (Status status = grow(at_once ? view_.low + 1 : static_cast<uint64_t>(kMovesPerKey * more + 64)); !status.ok())
      return status;
    if (!settled()) return {};
  }
}

bool Index::shrink(int64_t budget) {
  if (settled()) {
    if (view_.high <= kMinBuckets || static_cast<double>(size_) > room(view_.high, kShrinkAt)) return true;
    if (budget <= 0) return false;  // once begun, a shrink's frontier is above 0: a growth back starts below it
    view_.low = std::max(kMinBuckets, static_cast<uint64_t>(static_cast<double>(size_) / (kBucketKeys * kFresh)) + 1);
    view_.frontier = 0;
  } else if (static_cast<double>(size_) > room(view_.low, kGrowAt)) {
    return true;  // it is on its way up
  }
  for (int64_t done = 0; done < budget; done += kBatch) {
    uint64_t begin = scaled(view_.frontier, view_.high);
    uint64_t end = std::min(begin + kBatch, view_.high);
    if (!collect(view_.high, begin, end)) {
      if (view_.frontier == 0) view_.low = view_.high;  // it has not begun
      return false;
    }
    view_.frontier = first_hash(end, view_.high);
    resettle();
    if (end == view_.high) {
      view_.high = view_.low;
      release_tail();
      // This may have been a growth that was reversed, or keys may have been erased since it began: then more memory
      // can be freed.
      return shrink(budget - done - static_cast<int64_t>(kBatch));
    }
  }
  return false;
}

void Index::release_tail() {
  uint64_t end = view_.high;
  while (end < extent_ && view_.at(end - 1)->over) ++end;
  for (uint64_t at = end; at < extent_ && at % kChunkBuckets; ++at) *view_.at(at) = Bucket{};
  extent_ = end;
  uint64_t keep = (end + kSpillBuckets + kChunkBuckets - 1) / kChunkBuckets;
  for (uint64_t chunk = end / kChunkBuckets; chunk < std::min<uint64_t>(keep, pages_.size()); ++chunk) {
    uint64_t begin = chunk * kChunkBuckets;
    pages_[chunk].discard(end > begin ? (end - begin) * sizeof(Bucket) : 0);
  }
  if (keep < pages_.size()) {
    pages_.resize(keep);
    chunks_.resize(keep);
    view_.chunks = chunks_.data();
  }
}

}  // namespace shoal
