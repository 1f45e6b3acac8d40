#include "lookup/victims.h"

#include <algorithm>
#include <cmath>

#include "index/batch.h"

namespace shoal {

namespace {

constexpr uint64_t kPortionBuckets = 8192;  // about 30,000 keys
constexpr double kLeastShare = 0.125;  // of a portion: at least this may leave before the next portion is looked at
constexpr size_t kAhead = 16;          // rows whose flags are on their way to the cache

}  // namespace

int64_t Pins::count() const {
  int64_t count = 0;
  for (uint64_t word : bits_) count += __builtin_popcountll(word);
  return count;
}

void Victims::look_further(const Index& index, const Rows& rows, uint32_t clock, double share, uint64_t* seen) {
  const uint64_t extent = index.extent();
  if (next_bucket_ >= extent) next_bucket_ = 0;
  const uint64_t end = std::min(next_bucket_ + kPortionBuckets, extent);
  std::vector<Candidate> portion;
  index.scan(next_bucket_, end, [&](int64_t key, uint32_t slot) { portion.push_back({key, slot, 0, 0}); });
  for (size_t i = 0; i < portion.size() + kAhead; ++i) {
    if (i < portion.size()) __builtin_prefetch(&rows.flags(rows.tail(portion[i].slot)));
    if (i < kAhead) continue;
    Candidate& candidate = portion[i - kAhead];
    const uint32_t flags = rows.flags(rows.tail(candidate.slot));
    candidate.age = age_of(flags, clock);
    candidate.stamp = flags >> kStampShift;
  }
  *seen += end - next_bucket_;
  next_bucket_ = end;
  // Among rows of the same age any will do, but not all from one end of the portion.
  const auto younger = [](const Candidate& a, const Candidate& b) {
    return a.age != b.age ? a.age < b.age : a.slot < b.slot;
  };
  const auto taken = static_cast<size_t>(std::ceil(share * static_cast<double>(portion.size())));
  const auto from = portion.end() - static_cast<std::ptrdiff_t>(taken);
  if (from != portion.begin() && from != portion.end()) std::nth_element(portion.begin(), from, portion.end(), younger);
  std::sort(from, portion.end(), younger);
  queue_.assign(from, portion.end());
}

Victims::Chosen Victims::choose(const Index& index, const Rows& rows, uint32_t clock, const Pins& pins, int64_t n) {
  std::vector<Candidate> chosen;
  std::vector<uint64_t> taken((size_t(rows.slab_count) << rows.slot_bits) / 64 + 1);
  // Every portion gives the same share. Otherwise portions that gave more would be empty, and the buckets of the
  // others, which get as many new keys, would overflow: finds took a hundred times as long. If the share does not
  // suffice, it grows.
  const double wanted = static_cast<double>(n) / static_cast<double>(std::max<int64_t>(index.size(), 1));
  double share = std::clamp(wanted, kLeastShare, 1.0);
  while (true) {
    for (uint64_t seen = 0; int64_t(chosen.size()) < n;) {
      while (!queue_.empty() && int64_t(chosen.size()) < n) {
        const Candidate candidate = queue_.back();
        queue_.pop_back();
        uint64_t& word = taken[candidate.slot / 64];
        const uint64_t bit = uint64_t{1} << (candidate.slot % 64);
        if (pins.has(candidate.slot) || word & bit) continue;
        // The row may have left, or have been used, since it was queued.
        if (index.find(candidate.key) != candidate.slot) continue;
        if (share < 1.0 && rows.flags(rows.tail(candidate.slot)) >> kStampShift != candidate.stamp) continue;
        word |= bit;
        chosen.push_back(candidate);
      }
      if (int64_t(chosen.size()) == n || seen >= index.extent()) break;
      look_further(index, rows, clock, share, &seen);
    }
    if (int64_t(chosen.size()) == n || share == 1.0) break;
    share = std::min(2 * share, 1.0);
  }
  Chosen result;
  const auto is_dirty = [&](const Candidate& candidate) { return rows.flags(rows.tail(candidate.slot)) & kDirty; };
  const auto clean = std::stable_partition(chosen.begin(), chosen.end(), is_dirty);
  result.dirty = clean - chosen.begin();
  for (const Candidate& candidate : chosen) {
    result.keys.push_back(candidate.key);
    result.slots.push_back(candidate.slot);
  }
  return result;
}

}  // namespace shoal
