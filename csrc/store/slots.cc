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
constexpr size_t kPartsPerPage = kHugePage / size_t{kPartBytes};
constexpr uint32_t kLeastBuckets = 16;  // of a part that is its section's only one
// Fuller ones pass many keys on to the next bucket; less full ones take more than 24 bytes a key, since half of a full
// part is what is in it after its split.
constexpr int64_t kFullPercent = 85;
constexpr uint32_t full(uint32_t buckets) { return uint32_t(buckets * int64_t{kBucketKeys} * kFullPercent / 100); }
// The share of a full part that two parts may hold together to become one. If it is larger, the next keys split them
// again; if it is smaller, a shrinking index takes more than 24 bytes a key.
constexpr int64_t kMergedPercent = 94;
constexpr uint32_t merged(uint32_t buckets) { return uint32_t(full(buckets) * kMergedPercent / 100); }
constexpr uint32_t kLooksEvery = 16;  // erases between two looks at a part's other half, which lies elsewhere
// From here on a page is 6 % of the index at most, and comes as a huge one although not all of it is in use.
constexpr size_t kWholeFromPage = 16;
constexpr int64_t kMostAhead = 2;   // pages: a third is not needed before these can be made
constexpr int64_t kMostBytes = 24;  // of a key, with those pages

// Bits of a hash: the highest choose the section, the next ones the part, the lowest the bucket.
constexpr int kSectionBits = 10;
// A section has that many times fewer parts than its common bits could tell apart only if keys were chosen to have
// similar hashes; then no part is split further.
constexpr uint64_t kSparse = 64;

constexpr int kThreads = 2;
constexpr int kTogether = 16;  // keys whose buckets are prefetched while as many are looked at
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

bool SlotIndex::Part::has_room() const { return size < full(mask + 1u); }

uint32_t* SlotIndex::Part::locate(uint64_t hash, int64_t key) const {
  // Keys that were chosen for it could have been passed on through all buckets.
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
      if (part.has_room()) return {};
      if (part.mask + 1u < kPartBuckets) {
        section->bucket_bytes += (int64_t{part.mask} + 1) * int64_t{sizeof(Bucket)};
        deal_out(&part, uint16_t(2 * part.mask + 1), nullptr);
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
  if (Status status = take_buckets(*section, &part); !status.ok()) return status;
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
  if (Status status = take_buckets(*section, &other); !status.ok()) return status;
  Part& part = section->part_of(hash);
  deal_out(&part, part.mask, &other);
  other.depth = ++part.depth;
  part.prefix = 2 * part.prefix;
  other.prefix = part.prefix + 1;
  // The places of a part are next to each other: the upper half becomes the other part's.
  std::fill_n(which.begin() + int64_t(section->first_place(other)), section->places(other), uint32_t(parts.size()));
  parts.push_back(other);
  section->bucket_bytes += kPartBytes;
  return {};
}

void SlotIndex::deal_out(Part* part, uint16_t mask, Part* other) {
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
  part->mask = mask;
  for (int i = 0; i < n; ++i) {
    const uint64_t hash = hash_of(keys[i]);
    Part* const into = other != nullptr && goes_to_other(hash, part->depth) ? other : part;
    into->place(hash, keys[i], slots[i]);
  }
}

Status SlotIndex::take_buckets(const Section& section, Part* part) {
  std::lock_guard lock(mutex_);
  if (owners_.size() == owners_.capacity()) owners_.reserve(owners_.size() + owners_.size() / 4 + 1);
  if (owners_.size() == pages_.size() * kPartsPerPage) {
    // All of the last one is in use: it takes no more as a huge one.
    if (!pages_.empty()) pages_.back().collapse();
    pages_.reserve(pages_.size() + 1);
    Pages pages;
    const bool whole = pages_.size() >= kWholeFromPage;
    if (Status status = whole ? PageStock::instance().take(&pages) : Pages::map(kHugePage, &pages); !status.ok())
      return status;
    pages_.push_back(std::move(pages));
  }
  part->number = uint32_t(owners_.size());
  part->buckets = place_of(part->number);
  owners_.push_back({uint32_t(&section - sections_.data()), uint32_t(section.parts.size())});
  return {};
}

Bucket* SlotIndex::place_of(uint32_t number) const {
  return reinterpret_cast<Bucket*>(pages_[number / kPartsPerPage].data() + number % kPartsPerPage * kPartBytes);
}

void SlotIndex::prepare_growth() {
  const int64_t now = bytes() - pages_ahead_ * int64_t{kHugePage};
  const int64_t room = pages_.size() < kWholeFromPage ? 0 : kMostBytes * size() - now;
  const int64_t pages = std::clamp<int64_t>(room / int64_t{kHugePage}, 0, kMostAhead);
  if (pages != pages_ahead_) PageStock::instance().want(pages - pages_ahead_);
  pages_ahead_ = pages;
}

// ---- what is erased

void SlotIndex::shrink(Section* section, uint64_t hash) {
  bool less = false;
  while (merge(section, hash)) less = true;
  if (less) shrink_lists(section);
  Part& part = section->part_of(hash);
  while (section->parts.size() == 1 && part.mask + 1u > kLeastBuckets && part.size <= merged((part.mask + 1u) / 2)) {
    deal_out(&part, part.mask / 2, nullptr);
    clear_buckets(part.number, part.mask + 1u);
    section->bucket_bytes -= (int64_t{part.mask} + 1) * int64_t{sizeof(Bucket)};
    less = true;
  }
  if (less) prepare_growth();
}

bool SlotIndex::merge(Section* section, uint64_t hash) {
  const uint32_t one = section->which[section->number_of(hash)];
  const Part& part = section->parts[one];
  if (part.depth == 0) return false;
  const uint32_t other = section->which[section->number_of(hash) ^ section->places(part)];
  if (section->parts[other].depth != part.depth || part.size + section->parts[other].size > merged(kPartBuckets))
    return false;
  // Keys go to the fuller one.
  const bool into_one = part.size >= section->parts[other].size;
  Part& into = section->parts[into_one ? one : other];
  const uint32_t goes = into_one ? other : one;
  const Part& from = section->parts[goes];
  for (uint32_t at = 0; at <= from.mask; ++at) {
    const Bucket& bucket = from.buckets[at];
    for (uint32_t used = bucket.used; used != 0; used &= used - 1) {
      const int i = __builtin_ctz(used);
      into.place(hash_of(bucket.keys[i]), bucket.keys[i], bucket.slots[i]);
    }
  }
  --into.depth;
  into.prefix /= 2;
  std::fill_n(section->which.begin() + int64_t(section->first_place(into)), section->places(into),
              into_one ? one : other);
  remove(section, goes);
  return true;
}

void SlotIndex::remove(Section* section, uint32_t number) {
  std::vector<Part>& parts = section->parts;
  const uint32_t place = parts[number].number;
  if (number + 1 < parts.size()) {
    const Part& moves = parts[number] = parts.back();
    std::fill_n(section->which.begin() + int64_t(section->first_place(moves)), section->places(moves), number);
    owners_[moves.number].part = number;
  }
  parts.pop_back();
  section->bucket_bytes -= kPartBytes;
  give_buckets(place);
}

void SlotIndex::give_buckets(uint32_t number) {
  const auto last = uint32_t(owners_.size() - 1);
  if (number != last) {
    Part& moves = sections_[owners_[last].section].parts[owners_[last].part];
    Bucket* const to = place_of(number);
    std::copy_n(moves.buckets, moves.mask + 1u, to);
    clear_buckets(number, moves.mask + 1u);
    moves.buckets = to;
    moves.number = number;
    owners_[number] = owners_[last];
  }
  clear_buckets(last, 0);
  owners_.pop_back();
  // One empty page stays: the next part may need it.
  while (pages_.size() > (owners_.size() + kPartsPerPage - 1) / kPartsPerPage + 1) pages_.pop_back();
}

void SlotIndex::clear_buckets(uint32_t number, uint32_t from) {
  const size_t page = number / kPartsPerPage;
  Bucket* const buckets = place_of(number);
  uint32_t to = kPartBuckets;
  if (page < kWholeFromPage) {
    constexpr uint32_t kTogetherGiven = 4096 / sizeof(Bucket);
    const size_t begin = number % kPartsPerPage * size_t{kPartBytes};
    pages_[page].discard(begin + from * sizeof(Bucket), begin + size_t{kPartBytes});
    to = (from + kTogetherGiven - 1) / kTogetherGiven * kTogetherGiven;
  }
  for (uint32_t at = from; at < to; ++at) buckets[at].used = 0, buckets[at].over = 0;
}

// They stay as they are if there is no memory for smaller ones.
void SlotIndex::shrink_lists(Section* section) {
  std::vector<Part>& parts = section->parts;
  std::vector<uint32_t>& which = section->which;
  try {
    if (parts.capacity() > 2 * parts.size()) parts.shrink_to_fit();
    if (owners_.capacity() > 2 * owners_.size()) owners_.shrink_to_fit();
    if (which.size() < 4 * parts.size()) return;
    uint32_t depth = 0;
    for (const Part& part : parts) depth = std::max<uint32_t>(depth, part.depth);
    if (depth == section->depth) return;
    for (size_t i = 0; i < which.size() / 2; ++i) which[i] = which[2 * i];
    which.resize(which.size() / 2);
    --section->depth;
    which.shrink_to_fit();
  } catch (const std::bad_alloc&) {
  }
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
  lists += int64_t(owners_.capacity() * sizeof(Owner));
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
    // Each is stored, and then kept or overwritten: a branch would be predicted wrong for half of them.
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
        if (section.parts.empty() || !section.part_of(hash).has_room()) {
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
  Part& part = section.part_of(hash);
  const uint32_t slot = part.erase(hash, key);
  if (slot == kNoSlot) return slot;
  --section.size;
  if (part.size % kLooksEvery == 0) shrink(&section, hash);
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
