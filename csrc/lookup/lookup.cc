#include "lookup/lookup.h"

#include <algorithm>
#include <atomic>

#include "base/thread_pool.h"
#include "index/probe.h"

namespace shoal {

namespace {

struct Positions {
  int64_t begin, end;
};

Positions positions_of(const PoolTask& task, const Bags& bags) {
  int64_t first = task.feature->source * bags.batch;
  if (task.feature->pooling == Pooling::none) return {bags.offset(first) + task.begin, bags.offset(first) + task.end};
  return {bags.offset(first + task.begin), bags.offset(first + task.end)};
}

// Slots of one task's positions; how many have none.
int64_t find_task(const Index& index, const PoolTask& task, const Bags& bags, uint32_t* slots) {
  auto [begin, end] = positions_of(task, bags);
  uint32_t* out = slots + task.feature->copy * bags.count + begin;
  size_t n = static_cast<size_t>(end - begin);
  if (index.size() == 0) {
    std::fill(out, out + n, kNoSlot);
    return end - begin;
  }
  const Probe& table = probe();
  size_t lost = bags.narrow_keys ? table.find32(index.view(), static_cast<const int32_t*>(bags.keys) + begin, n, out)
                                 : table.find64(index.view(), static_cast<const int64_t*>(bags.keys) + begin, n, out);
  return static_cast<int64_t>(lost);
}

// The same for positions that had none when others were found.
int64_t find_rest(const Index& index, const PoolTask& task, const Bags& bags, uint32_t* slots) {
  auto [begin, end] = positions_of(task, bags);
  uint32_t* first = slots + task.feature->copy * bags.count;
  int64_t lost = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (first[i] != kNoSlot) continue;
    first[i] = index.find(bags.key(i));
    lost += first[i] == kNoSlot;
  }
  return lost;
}

}  // namespace

Found lookup(const std::vector<LookupPart>& parts, const Bags& bags, uint32_t* slots, bool known, Dtype out_dtype,
             int threads) {
  std::vector<PoolTask> tasks;
  std::vector<size_t> part_of;
  int64_t work = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    work += split_pool(parts[p].feature, bags, &tasks);
    part_of.resize(tasks.size(), p);
  }
  ThreadPool& pool = ThreadPool::instance();
  threads = threads_for(work, kPoolTaskRows, threads);
  Found found;
  found.missing.assign(parts.size(), 0);
  std::vector<char> lacks(tasks.size(), 0);
  pool.run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
    size_t at = static_cast<size_t>(t);
    const auto find = known ? find_rest : find_task;
    int64_t lost = find(*parts[part_of[at]].index, tasks[at], bags, slots);
    if (!lost) return;
    lacks[at] = 1;
    std::atomic_ref<int64_t>(found.missing[part_of[at]]).fetch_add(lost, std::memory_order_relaxed);
  });
  bool births = false;
  for (size_t p = 0; p < parts.size(); ++p) births |= parts[p].waits && found.missing[p];
  // A part that only reads may lack a key that another part is about to give a row, so it waits too.
  std::vector<PoolTask> ready;
  for (size_t t = 0; t < tasks.size(); ++t)
    if (births && lacks[t])
      found.rest.push_back({part_of[t], tasks[t]});
    else
      ready.push_back(tasks[t]);
  // A second sweep, not the end of the first: all misses of a sweep are then of one kind, and the rows of uniform keys
  // arrive in 0.85 of the time.
  pool.run(static_cast<int64_t>(ready.size()), threads,
           [&](int64_t t) { pool_task(ready[static_cast<size_t>(t)], bags, out_dtype); });
  return found;
}

void pool_rest(const std::vector<LookupPart>& parts, const std::vector<WaitingTask>& rest, const Bags& bags,
               uint32_t* slots, Dtype out_dtype, int threads) {
  ThreadPool::instance().run(static_cast<int64_t>(rest.size()), threads, [&](int64_t t) {
    const auto& [part, task] = rest[static_cast<size_t>(t)];
    if (!parts[part].waits) find_task(*parts[part].index, task, bags, slots);
    pool_task(task, bags, out_dtype);
  });
}

}  // namespace shoal
