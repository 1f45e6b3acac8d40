#include "index/batch.h"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "base/thread_pool.h"
#include "index/probe.h"

namespace shoal {

// Large enough to hide a task's start, small enough to balance uneven features.
static constexpr int64_t kKeysPerTask = 2048;

std::vector<int64_t> keys_without(std::span<const int64_t> keys, std::span<const std::span<const int64_t>> others) {
  std::vector<int64_t> sorted(keys.begin(), keys.end()), left;
  std::sort(sorted.begin(), sorted.end());
  for (const auto& other : others) {
    left.clear();
    std::set_difference(sorted.begin(), sorted.end(), other.begin(), other.end(), std::back_inserter(left));
    sorted.swap(left);
  }
  return sorted;
}

void find(const std::vector<KeyRange>& ranges, Keys keys, uint32_t* slots, int64_t* missing, int threads) {
  struct Task {
    int64_t range, begin, end;
  };
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int64_t r = 0; r < static_cast<int64_t>(ranges.size()); ++r) {
    missing[r] = 0;
    work += ranges[r].end - ranges[r].begin;
    for (int64_t at = ranges[r].begin; at < ranges[r].end; at += kKeysPerTask)
      tasks.push_back({r, at, std::min(at + kKeysPerTask, ranges[r].end)});
  }
  const Probe& table = probe();
  threads = threads_for(work, kKeysPerTask, threads);
  ThreadPool::instance().run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
    const Task& task = tasks[t];
    const Index& index = *ranges[task.range].index;
    uint32_t* out = slots + ranges[task.range].shift + task.begin;
    size_t n = static_cast<size_t>(task.end - task.begin), lost = n;
    if (index.size() == 0)
      std::fill(out, out + n, kNoSlot);
    else if (keys.narrow)
      lost = table.find32(index.view(), static_cast<const int32_t*>(keys.data) + task.begin, n, out);
    else
      lost = table.find64(index.view(), static_cast<const int64_t*>(keys.data) + task.begin, n, out);
    if (lost)
      std::atomic_ref<int64_t>(missing[task.range]).fetch_add(static_cast<int64_t>(lost), std::memory_order_relaxed);
  });
}

namespace {

// Sizes of one table's share of the memory. The set of its keys is open-addressed and at most half full.
struct Share {
  int64_t missing = 0;
  uint64_t set = 0;
  size_t bytes() const {
    return static_cast<size_t>(missing) * (2 * sizeof(int64_t) + sizeof(uint32_t)) + set * sizeof(uint32_t);
  }
};

// The two ways to find missing keys: to scan a feature's slots, or a list.
struct Slots {
  const uint32_t* all;
  int64_t count(const KeyRange& range) const {
    return std::count(all + range.shift + range.begin, all + range.shift + range.end, kNoSlot);
  }
  template <typename Visit>
  void each(const KeyRange& range, const Visit& visit) const {
    for (int64_t i = range.begin; i < range.end; ++i)
      if (all[range.shift + i] == kNoSlot) visit(i, range.shift);
  }
};
struct Listed {
  int64_t count(const Lacking* lacking) const { return static_cast<int64_t>(lacking->positions.size()); }
  template <typename Visit>
  void each(const Lacking* lacking, const Visit& visit) const {
    for (int64_t i : lacking->positions) visit(i, lacking->shift);
  }
};

template <typename Feature, typename Where>
Share share_of(const std::vector<Feature>& features, const Where& where) {
  Share share;
  for (const Feature& feature : features) share.missing += where.count(feature);
  share.set = 16;
  while (share.set < 2 * static_cast<uint64_t>(share.missing)) share.set *= 2;
  // The next table's numbers of 64 bits begin at a multiple of 8.
  share.missing += share.missing % 2;
  return share;
}

template <typename Feature, typename Where>
void collect(const std::vector<Feature>& features, const Where& where, Keys keys, uint32_t* set, uint64_t capacity,
             MissingKeys::Table* table) {
  std::fill(set, set + capacity, kNoSlot);
  for (const Feature& feature : features) {
    where.each(feature, [&](int64_t i, int64_t shift) {
      int64_t key = keys[i];
      uint64_t at = mix64(static_cast<uint64_t>(key)) & (capacity - 1);
      while (set[at] != kNoSlot && table->keys[set[at]] != key) at = (at + 1) & (capacity - 1);
      if (set[at] == kNoSlot) {
        set[at] = static_cast<uint32_t>(table->count);
        table->keys[table->count++] = key;
      }
      table->places[table->places_count] = shift + i;
      table->which[table->places_count++] = set[at];
    });
    table->count_after.push_back(table->count);
  }
}

}  // namespace

template <typename Feature, typename Where>
void MissingKeys::collect_all(const std::vector<std::vector<Feature>>& tables, const Where& where, Keys keys,
                              int threads) {
  ThreadPool& pool = ThreadPool::instance();
  std::vector<Share> shares(tables.size());
  const auto tasks = static_cast<int64_t>(tables.size());
  pool.run(tasks, threads,
           [&](int64_t t) { shares[static_cast<size_t>(t)] = share_of(tables[static_cast<size_t>(t)], where); });
  size_t bytes = 0;
  for (const Share& share : shares) bytes += share.bytes();
  memory_ = Kept<char>(bytes);
  std::vector<uint32_t*> sets;
  char* at = memory_.get();
  for (size_t t = 0; t < tables.size(); ++t) {
    tables_[t].keys = reinterpret_cast<int64_t*>(at);
    tables_[t].places = tables_[t].keys + shares[t].missing;
    tables_[t].which = reinterpret_cast<uint32_t*>(tables_[t].places + shares[t].missing);
    sets.push_back(tables_[t].which + shares[t].missing);
    at += shares[t].bytes();
  }
  pool.run(tasks, threads, [&](int64_t t) {
    size_t table = static_cast<size_t>(t);
    collect(tables[table], where, keys, sets[table], shares[table].set, &tables_[table]);
  });
}

MissingKeys::MissingKeys(const std::vector<std::vector<KeyRange>>& tables, Keys keys, const uint32_t* slots,
                         int threads)
    : tables_(tables.size()), memory_(0) {
  collect_all(tables, Slots{slots}, keys, threads);
}

MissingKeys::MissingKeys(const std::vector<std::vector<const Lacking*>>& tables, Keys keys, int threads)
    : tables_(tables.size()), memory_(0) {
  // To collect a few keys takes less time than to wake a thread.
  constexpr int64_t kPositionsPerThread = 2048;
  int64_t positions = 0;
  for (const auto& features : tables)
    for (const Lacking* lacking : features) positions += static_cast<int64_t>(lacking->positions.size());
  collect_all(tables, Listed{}, keys, threads_for(positions, kPositionsPerThread, threads));
}

void MissingKeys::fill(size_t table, const uint32_t* slots_of_keys, uint32_t* slots) const {
  const Table& missing = tables_[table];
  for (int64_t i = 0; i < missing.places_count; ++i) slots[missing.places[i]] = slots_of_keys[missing.which[i]];
}

}  // namespace shoal
