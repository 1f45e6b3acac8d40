#include "index/batch.h"

#include <algorithm>
#include <atomic>

#include "base/thread_pool.h"
#include "index/probe.h"

namespace shoal {

// Large enough to hide a task's start, small enough to balance uneven features.
static constexpr int64_t kKeysPerTask = 2048;

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

Missing collect_missing(const std::vector<KeyRange>& ranges, Keys keys, const uint32_t* slots) {
  Missing missing;
  for (const KeyRange& range : ranges)
    for (int64_t at = range.begin; at < range.end; ++at)
      if (slots[range.shift + at] == kNoSlot) {
        missing.positions.push_back(at);
        missing.places.push_back(range.shift + at);
      }
  missing.which.resize(missing.positions.size());

  // An open-addressed set of the distinct keys, as numbers into missing.keys; at most half full.
  uint64_t capacity = 16;
  while (capacity < 2 * missing.positions.size()) capacity *= 2;
  std::vector<uint32_t> table(capacity, kNoSlot);
  for (size_t i = 0; i < missing.positions.size(); ++i) {
    int64_t key = keys[missing.positions[i]];
    uint64_t at = mix64(static_cast<uint64_t>(key)) & (capacity - 1);
    while (table[at] != kNoSlot && missing.keys[table[at]] != key) at = (at + 1) & (capacity - 1);
    if (table[at] == kNoSlot) {
      table[at] = static_cast<uint32_t>(missing.keys.size());
      missing.keys.push_back(key);
    }
    missing.which[i] = table[at];
  }
  return missing;
}

void Missing::fill(const uint32_t* slots_of_keys, uint32_t* slots) const {
  for (size_t i = 0; i < places.size(); ++i) slots[places[i]] = slots_of_keys[which[i]];
}

}  // namespace shoal
