#include "store/slots.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "base/hash.h"
#include "base/page_stock.h"
#include "base/thread_pool.h"

namespace shoal {

namespace {

constexpr uint32_t kPartBuckets = 512;
constexpr int64_t kPartBytes = kPartBuckets * int64_t{sizeof(Bucket)};
constexpr int64_t kPartsPerPage = int64_t{kHugePage} / kPartBytes;
constexpr uint32_t kLeastBuckets = 16;  // of a part that is its section's only one
// Fuller ones pass many keys on to the next bucket; less full ones take more than 24 bytes a key, since half of a full
// part is what is in it after its split.
constexpr int64_t kFullPercent = 85;
// From here on a page is 6 % of the index at most, and comes as a huge one although not all of it is in use.
constexpr size_t kWholeFromPage = 16;
constexpr int64_t kMostAhead = 2;   // pages: a third is not needed before these can be made
constexpr int64_t kMostBytes = 24;  // of a key, with those pages

// Bits of a hash: the highest choose the section, the next ones the part, the lowest the bucket.
constexpr int kSectionBits = 10;
// A section's parts are that many times fewer than what their common bits could tell apart only where keys were made
// to have hashes alike; then it is left at that.
constexpr uint64_t kSparse = 64;

constexpr int kThreads = 2;
constexpr int kTogether = 16;  // keys whose buckets are on their way to the cache while as many are looked at
// Keys that are worth waking another thread for.
constexpr int64_t kWorthAThread = 1024;

uint64_t hash_of(int64_t key) { return mix64(uint64_t(key)); }

uint64_t behind_section(uint64_t hash) { return hash << kSectionBits; }

// The bit that tells the halves of a part apart.
bool goes_to_other(uint64_t hash, uint32_t depth) { return behind_section(hash) >> (63 - depth) & 1; }

uint32_t match(const Bucket& bucket, int64_t key) {
  uint32_t same = 0;
  for (int i = 0; i < kBucketKeys; ++i) same |= uint32_t(bucket.keys[i] == key) << i;
  return same & bucket.used;
}

}  // namespace

// Section s has a share of 2^(s / kSections): the first is full when the last was split, and the others in between.
int SlotIndex::section_of(uint64_t hash) {
  static const auto sections = [] {
    std::array<uint8_t, size_t{1} << kSectionBits> made{};
    for (size_t i = 0; i < made.size(); ++i)
      made[i] = uint8_t(kSections * std::log2(1.0 + (double(i) + 0.5) / double(made.size())));
    return made;
  }();
  return sections[hash >> (64 - kSectionBits)];
}

// ---- one part

int64_t SlotIndex::Part::room() const { return (int64_t{mask} + 1) * kBucketKeys * kFullPercent / 100 - size; }

uint32_t* SlotIndex::Part::locate(uint64_t hash, int64_t key) const {
  // Keys that were made for it could have been passed on through all buckets.
  for (uint64_t step = 0; step <= mask; ++step) {
    Bucket& bucket = home(hash + step);
    if (const uint32_t found = match(bucket, key)) return &bucket.slots[__builtin_ctz(found)];
    if (bucket.over == 0) break;
  }
  return nullptr;
}

void SlotIndex::Part::place(uint64_t hash, int64_t key, uint32_t slot) {
  for (;; ++hash) {
    Bucket& bucket = home(hash);
    const uint32_t free = ~uint32_t{bucket.used} & ((1u << kBucketKeys) - 1);
    if (free == 0) {
      ++bucket.over;
      continue;
    }
    const int i = __builtin_ctz(free);
    bucket.keys[i] = key;
    bucket.slots[i] = slot;
    bucket.used |= uint8_t(1u << i);
    ++size;
    return;
  }
}

uint32_t SlotIndex::Part::erase(uint64_t hash, int64_t key) {
  for (uint64_t step = 0; step <= mask; ++step) {
    Bucket& bucket = home(hash + step);
    if (const uint32_t found = match(bucket, key)) {
      const int i = __builtin_ctz(found);
      bucket.used &= uint8_t(~(1u << i));
      while (step > 0) --home(hash + --step).over;
      --size;
      return bucket.slots[i];
    }
    if (bucket.over == 0) break;
  }
  return kNoSlot;
}

// ---- growth

size_t SlotIndex::Section::number_of(uint64_t hash) const {
  return size_t(behind_section(hash) >> 1 >> (63 - depth));  // by 64 at once would be undefined
}

Status SlotIndex::make_room(Section* section, uint64_t hash) {
  try {
    if (section->parts.empty()) return begin(section);
    while (true) {
      Part& part = section->part_of(hash);
      if (part.room() > 0) return {};
      if (part.mask + 1 < kPartBuckets) {
        section->bucket_bytes += (int64_t{part.mask} + 1) * int64_t{sizeof(Bucket)};
        part.mask = 2 * part.mask + 1;
        deal_out(&part, nullptr);
      } else if (Status status = split(section, hash); !status.ok()) {
        return status;
      }
    }
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

Status SlotIndex::begin(Section* section) {
  section->parts.reserve(1);
  section->which.reserve(1);
  Part part{.mask = kLeastBuckets - 1};
  if (Status status = take_buckets(&part.buckets); !status.ok()) return status;
  section->parts.push_back(part);
  section->which.push_back(0);
  section->bucket_bytes = kLeastBuckets * int64_t{sizeof(Bucket)};
  return {};
}

Status SlotIndex::split(Section* section, uint64_t hash) {
  std::vector<Part>& parts = section->parts;
  std::vector<uint32_t>& which = section->which;
  if (section->part_of(hash).depth == section->depth) {
    if (which.size() > kSparse * parts.size())
      return {Code::capacity, "too many keys have hashes that begin alike. Spread the ids of this table."};
    std::vector<uint32_t> doubled(2 * which.size());
    for (size_t i = 0; i < doubled.size(); ++i) doubled[i] = which[i / 2];
    which = std::move(doubled);
    ++section->depth;
  }
  if (parts.size() == parts.capacity()) parts.reserve(parts.size() + parts.size() / 4 + 1);
  Part other{.mask = kPartBuckets - 1};
  if (Status status = take_buckets(&other.buckets); !status.ok()) return status;
  Part& part = section->part_of(hash);
  deal_out(&part, &other);
  other.depth = ++part.depth;
  // The places of a part are beside each other: the upper half becomes the other's.
  const size_t places = size_t{1} << (section->depth - part.depth);
  const size_t first = section->number_of(hash) / (2 * places) * (2 * places);
  std::fill_n(which.begin() + int64_t(first + places), places, uint32_t(parts.size()));
  parts.push_back(other);
  section->bucket_bytes += kPartBytes;
  return {};
}

void SlotIndex::deal_out(Part* part, Part* other) {
  int64_t keys[kPartBuckets * kBucketKeys];
  uint32_t slots[kPartBuckets * kBucketKeys];
  int n = 0;
  for (uint32_t at = 0; at <= part->mask; ++at) {
    Bucket& bucket = part->buckets[at];
    for (uint32_t used = bucket.used; used != 0; used &= used - 1) {
      const int i = __builtin_ctz(used);
      keys[n] = bucket.keys[i];
      slots[n++] = bucket.slots[i];
    }
    bucket.used = 0;
    bucket.over = 0;
  }
  part->size = 0;
  for (int i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(keys[i]);
    Part* const into = other != nullptr && goes_to_other(hash, part->depth) ? other : part;
    into->place(hash, keys[i], slots[i]);
  }
}

Status SlotIndex::take_buckets(Bucket** buckets) {
  std::lock_guard lock(mutex_);
  if (taken_ == int64_t(pages_.size()) * kPartsPerPage) {
    // All of the last one is in use: it takes no more as a huge one.
    if (!pages_.empty()) pages_.back().collapse();
    pages_.reserve(pages_.size() + 1);
    Pages pages;
    const bool whole = pages_.size() >= kWholeFromPage;
    if (Status status = whole ? PageStock::instance().take(&pages) : Pages::map(kHugePage, &pages); !status.ok())
      return status;
    pages_.push_back(std::move(pages));
  }
  *buckets = reinterpret_cast<Bucket*>(pages_.back().data() + taken_ % kPartsPerPage * kPartBytes);
  ++taken_;
  return {};
}

void SlotIndex::prepare_growth() {
  const int64_t now = bytes() - pages_ahead_ * int64_t{kHugePage};
  const int64_t room = pages_.size() < kWholeFromPage ? 0 : kMostBytes * size() - now;
  const int64_t pages = std::clamp<int64_t>(room / int64_t{kHugePage}, 0, kMostAhead);
  if (pages != pages_ahead_) PageStock::instance().want(pages - pages_ahead_);
  pages_ahead_ = pages;
}

// ---- all of it

SlotIndex::~SlotIndex() { PageStock::instance().want(-pages_ahead_); }

int64_t SlotIndex::size() const {
  int64_t size = 0;
  for (const Section& section : sections_) size += section.size;
  return size;
}

int64_t SlotIndex::bytes() const {
  int64_t buckets = 0, lists = 0;
  for (const Section& section : sections_) {
    buckets += section.bucket_bytes;
    lists += int64_t(section.parts.capacity() * sizeof(Part) + section.which.capacity() * sizeof(uint32_t));
  }
  if (pages_.size() > kWholeFromPage) buckets = int64_t(pages_.size() * kHugePage);
  return buckets + lists + pages_ahead_ * int64_t{kHugePage};
}

void SlotIndex::find(const int64_t* keys, uint32_t* slots, int64_t n) const {
  uint64_t hashes[2 * kTogether];
  for (int64_t at = 0; at < n + kTogether; ++at) {
    if (at < n) {
      const uint64_t hash = hashes[at % (2 * kTogether)] = hash_of(keys[at]);
      const Section& section = sections_[size_t(section_of(hash))];
      if (section.size > 0) __builtin_prefetch(&section.part_of(hash).home(hash));
    }
    if (const int64_t number = at - kTogether; number >= 0) {
      const uint64_t hash = hashes[number % (2 * kTogether)];
      const Section& section = sections_[size_t(section_of(hash))];
      const uint32_t* const slot = section.size > 0 ? section.part_of(hash).locate(hash, keys[number]) : nullptr;
      slots[number] = slot == nullptr ? kNoSlot : *slot;
    }
  }
}

Status SlotIndex::put(const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had) {
  Status statuses[kThreads];
  ThreadPool::instance().run(kThreads, threads_for(n, kWorthAThread, kThreads), [&](int64_t thread) {
    statuses[thread] = put_some(int(thread), keys, n, first, from, had);
  });
  prepare_growth();
  for (Status& status : statuses)
    if (!status.ok()) return std::move(status);
  return {};
}

// Keys of every other section: two threads meet in none.
Status SlotIndex::put_some(int thread, const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from,
                           uint32_t* had) {
  Status status;
  struct Some {
    int64_t numbers[kTogether];
    uint64_t hashes[kTogether];
    int count = 0;
  } some, next;
  for (int64_t at = 0; at < n || next.count > 0;) {
    some = next;
    next.count = 0;
    // Each is stored and then kept or not: a branch would be guessed wrong for half of them.
    for (; at < n && next.count < kTogether; ++at) {
      next.numbers[next.count] = at;
      next.hashes[next.count] = hash_of(keys[at]);
      next.count += section_of(next.hashes[next.count]) % kThreads == thread;
    }
    for (int i = 0; i < next.count; ++i) {
      Section& section = sections_[size_t(section_of(next.hashes[i]))];
      if (section.size > 0) __builtin_prefetch(&section.part_of(next.hashes[i]).home(next.hashes[i]), 1);
    }
    for (int i = 0; i < some.count; ++i) {
      const int64_t number = some.numbers[i];
      const uint64_t hash = some.hashes[i];
      const uint32_t slot = first + uint32_t(number);
      Section& section = sections_[size_t(section_of(hash))];
      uint32_t* const there = section.size > 0 ? section.part_of(hash).locate(hash, keys[number]) : nullptr;
      const uint32_t before = there == nullptr ? kNoSlot : *there;
      had[number] = slot;
      if (from != nullptr && before != from[number]) continue;
      if (there != nullptr) {
        *there = slot;
      } else {
        if (section.parts.empty() || section.part_of(hash).room() == 0) {
          if (Status made = make_room(&section, hash); !made.ok()) {
            if (status.ok()) status = std::move(made);
            continue;
          }
        }
        section.part_of(hash).place(hash, keys[number], slot);
        ++section.size;
      }
      had[number] = before;
    }
  }
  return status;
}

uint32_t SlotIndex::erase(int64_t key) {
  const uint64_t hash = hash_of(key);
  Section& section = sections_[size_t(section_of(hash))];
  if (section.size == 0) return kNoSlot;
  const uint32_t slot = section.part_of(hash).erase(hash, key);
  section.size -= slot != kNoSlot;
  return slot;
}

std::vector<int64_t> SlotIndex::keys() const {
  std::vector<int64_t> keys;
  keys.reserve(size_t(size()));
  for (const Section& section : sections_) {
    for (const Part& part : section.parts) {
      for (uint32_t at = 0; at <= part.mask; ++at) {
        const Bucket& bucket = part.buckets[at];
        for (uint32_t used = bucket.used; used != 0; used &= used - 1) keys.push_back(bucket.keys[__builtin_ctz(used)]);
      }
    }
  }
  return keys;
}

}  // namespace shoal
