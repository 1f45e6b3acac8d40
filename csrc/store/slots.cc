#include "store/slots.h"

#include <algorithm>

#include "base/hash.h"
#include "base/page_stock.h"
#include "base/thread_pool.h"
#include "index/batch.h"

namespace shoal {

namespace {

// Keys whose buckets are in the first-level cache from the search until they are changed.
constexpr int kTogether = 256;
// Keys that are worth waking another thread for.
constexpr int64_t kWorthAThread = 1024;
// A growth is near when a twelfth more keys begin it; before, the pages for it would be too much for each key.
constexpr int64_t kNear = 12;
constexpr int64_t kMostBytes = 24;  // of a key, with those pages

}  // namespace

// By the lowest bits: a bucket is chosen by the highest.
int SlotIndex::part_of(int64_t key) { return int(mix64(uint64_t(key)) % kParts); }

template <typename Work>
void SlotIndex::for_part(int part, const int64_t* keys, int64_t n, const Work& work) {
  int64_t numbers[kTogether], of_part[kTogether];
  for (int64_t at = 0; at < n;) {
    int count = 0;
    // Each is stored and then kept or not: a branch would be guessed wrong for half of them.
    for (; at < n && count < kTogether; ++at) {
      numbers[count] = at;
      of_part[count] = keys[at];
      count += part_of(keys[at]) == part;
    }
    if (count > 0) work(numbers, of_part, count);
  }
}

SlotIndex::~SlotIndex() { PageStock::instance().want(-pages_ahead_); }

int64_t SlotIndex::size() const {
  int64_t size = 0;
  for (const Index& part : parts_) size += part.size();
  return size;
}

int64_t SlotIndex::bytes() const {
  int64_t bytes = pages_ahead_ * int64_t(kHugePage);
  for (const Index& part : parts_) bytes += part.bytes();
  return bytes;
}

void SlotIndex::find(const int64_t* keys, uint32_t* slots, int64_t n) const {
  for (int part = 0; part < kParts; ++part) {
    for_part(part, keys, n, [&](const int64_t* numbers, const int64_t* of_part, int count) {
      uint32_t found[kTogether];
      int64_t missing = 0;
      shoal::find({{&parts_[part], 0, count}}, {of_part, false}, found, &missing, 1);
      for (int i = 0; i < count; ++i) slots[numbers[i]] = found[i];
    });
  }
}

Status SlotIndex::put(const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had) {
  Status statuses[kParts];
  ThreadPool::instance().run(kParts, threads_for(n, kWorthAThread, kParts),
                             [&](int64_t part) { statuses[part] = put_part(int(part), keys, n, first, from, had); });
  prepare_growth();
  for (Status& status : statuses)
    if (!status.ok()) return std::move(status);
  return {};
}

Status SlotIndex::put_part(int part, const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from,
                           uint32_t* had) {
  Index& index = parts_[part];
  Status status;
  for_part(part, keys, n, [&](const int64_t* numbers, const int64_t* of_part, int count) {
    uint32_t before[kTogether], new_slots[kTogether];
    int64_t new_keys[kTogether], missing = 0;
    int added = 0;
    shoal::find({{&index, 0, count}}, {of_part, false}, before, &missing, 1);
    for (int i = 0; i < count; ++i) {
      const int64_t number = numbers[i];
      const uint32_t slot = first + uint32_t(number);
      if (from != nullptr && before[i] != from[number]) {
        had[number] = slot;
        continue;
      }
      had[number] = before[i];
      if (before[i] != kNoSlot) {
        index.reassign(of_part[i], slot);
      } else {
        new_keys[added] = of_part[i];
        new_slots[added++] = slot;
      }
    }
    Status put = index.reserve(added);
    if (put.ok()) put = index.insert(new_keys, new_slots, added);
    if (put.ok()) return;
    for (int i = 0; i < added; ++i) had[new_slots[i] - first] = new_slots[i];
    if (status.ok()) status = std::move(put);
  });
  return status;
}

void SlotIndex::prepare_growth() {
  int64_t now = 0, after = 0;
  for (const Index& part : parts_) {
    now += part.bytes();
    after += part.bytes_after(part.size() / kNear);
  }
  const int64_t pages = std::max<int64_t>((std::min(after, kMostBytes * size()) - now) / int64_t(kHugePage), 0);
  if (pages != pages_ahead_) PageStock::instance().want(pages - pages_ahead_);
  pages_ahead_ = pages;
}

uint32_t SlotIndex::erase(int64_t key) { return parts_[part_of(key)].erase(key); }

std::vector<int64_t> SlotIndex::keys() const {
  std::vector<int64_t> keys;
  keys.reserve(size_t(size()));
  for (const Index& part : parts_) part.scan(0, part.extent(), [&](int64_t key, uint32_t) { keys.push_back(key); });
  return keys;
}

}  // namespace shoal
