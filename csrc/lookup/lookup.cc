#include "lookup/lookup.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <shared_mutex>

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

int64_t keys_of(const PoolTask& task, const Bags& bags) {
  const Positions at = positions_of(task, bags);
  return at.end - at.begin;
}

// Writes the slots of some positions; returns how many have none.
int64_t find_some(const Index& index, const void* keys, bool narrow, Positions at, uint32_t* slots) {
  uint32_t* out = slots + at.begin;
  const size_t n = static_cast<size_t>(at.end - at.begin);
  if (index.size() == 0) {
    std::fill(out, out + n, kNoSlot);
    return at.end - at.begin;
  }
  const Probe& table = probe();
  size_t lost = narrow ? table.find32(index.view(), static_cast<const int32_t*>(keys) + at.begin, n, out)
                       : table.find64(index.view(), static_cast<const int64_t*>(keys) + at.begin, n, out);
  return static_cast<int64_t>(lost);
}

int64_t find_task(const Index& index, const PoolTask& task, const Bags& bags, uint32_t* slots) {
  return find_some(index, bags.keys, bags.narrow_keys, positions_of(task, bags),
                   slots + task.feature->slot_list * bags.count);
}

size_t key_bytes(const Bags& bags) { return bags.narrow_keys ? sizeof(int32_t) : sizeof(int64_t); }

bool are_the_same(const void* one, const void* two, size_t width, Positions at) {
  const size_t begin = static_cast<size_t>(at.begin) * width, bytes = static_cast<size_t>(at.end - at.begin) * width;
  return std::memcmp(static_cast<const char*>(one) + begin, static_cast<const char*>(two) + begin, bytes) == 0;
}

// The same for a task whose slots are known, except for positions that had none: these may have one by now.
int64_t find_rest(const Index& index, const PoolTask& task, const Bags& bags, const void* known, uint32_t* slots) {
  auto [begin, end] = positions_of(task, bags);
  if (begin == end) return 0;
  if (!are_the_same(known, bags.keys, key_bytes(bags), {begin, end})) return find_task(index, task, bags, slots);
  uint32_t* first = slots + task.feature->slot_list * bags.count;
  int64_t lost = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (first[i] != kNoSlot) continue;
    first[i] = index.find(bags.key(i));
    lost += first[i] == kNoSlot;
  }
  return lost;
}

}  // namespace

Found lookup(const std::vector<LookupPart>& parts, const Bags& bags, uint32_t* slots, const void* known,
             Dtype out_dtype, int threads) {
  std::vector<PoolTask> tasks;
  std::vector<size_t> part_of;
  int64_t keys = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    keys += split_pool(parts[p].feature, bags, &tasks);
    part_of.resize(tasks.size(), p);
  }
  ThreadPool& pool = ThreadPool::instance();
  threads = threads_for(keys, kPoolTaskRows, threads);
  bool may_bear = false;
  for (const LookupPart& part : parts) may_bear |= part.waits;
  // In the order of the tables, as in the backward: each row is read and written by the same thread.
  std::vector<int64_t> work(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t)
    work[t] = known ? keys_of(tasks[t], bags) : row_work(*tasks[t].feature->rows, keys_of(tasks[t], bags));
  Found found;
  found.missing.assign(parts.size(), 0);
  enum State : char { lacks = 1, pooled = 2 };
  std::vector<char> state(tasks.size(), 0);
  pool.run(work, threads, [&](int64_t t) {
    const PoolTask& task = tasks[static_cast<size_t>(t)];
    const size_t part = part_of[static_cast<size_t>(t)];
    const Index& index = *parts[part].index;
    int64_t lost;
    bool is_pooled = false;
    if (known) {
      lost = find_rest(index, task, bags, known, slots);
    } else if (index.size() == 0) {
      lost = find_task(index, task, bags, slots);
    } else {
      const Positions at = positions_of(task, bags);
      uint32_t* own = slots + task.feature->slot_list * bags.count;
      lost = find_and_pool_task(task, bags, {index.view(), at.begin, at.end, own, may_bear}, out_dtype);
      is_pooled = lost == 0 || !may_bear;
    }
    state[static_cast<size_t>(t)] = (lost ? lacks : 0) | (is_pooled ? pooled : 0);
    if (lost) std::atomic_ref<int64_t>(found.missing[part]).fetch_add(lost, std::memory_order_relaxed);
  });
  bool births = false;
  for (size_t p = 0; p < parts.size(); ++p) births |= parts[p].waits && found.missing[p];
  // A part that only reads may lack a key that another part is about to give a row, so it waits too.
  std::vector<PoolTask> ready;
  work.clear();
  for (size_t t = 0; t < tasks.size(); ++t)
    if (births && (state[t] & lacks)) {
      found.rest.push_back({part_of[t], tasks[t]});
    } else if (!(state[t] & pooled)) {
      ready.push_back(tasks[t]);
      work.push_back(row_work(*tasks[t].feature->rows, keys_of(tasks[t], bags)));
    }
  pool.run(work, threads, [&](int64_t t) { pool_task(ready[static_cast<size_t>(t)], bags, out_dtype); });
  return found;
}

void pool_rest(const std::vector<LookupPart>& parts, const std::vector<WaitingTask>& rest, const Bags& bags,
               uint32_t* slots, Dtype out_dtype, int threads) {
  std::vector<int64_t> work;
  for (const WaitingTask& one : rest) work.push_back(row_work(*one.task.feature->rows, keys_of(one.task, bags)));
  ThreadPool::instance().run(work, threads, [&](int64_t t) {
    const auto& [part, task] = rest[static_cast<size_t>(t)];
    if (!parts[part].waits) find_task(*parts[part].index, task, bags, slots);
    pool_task(task, bags, out_dtype);
  });
}

std::vector<Lacking> find_ahead(const std::vector<LookupPart>& parts, const Bags& bags,
                                const std::vector<int64_t>& bounds, void* kept, uint32_t* slots, RwLock& indexes,
                                int threads) {
  // A change of an index waits for at most this many keys of each thread. Large enough to hide a task's start.
  constexpr int64_t kTogether = 2048;
  struct Task {
    size_t first, last;  // parts, sorted by source, whose positions these are
    Positions at;
    std::vector<std::vector<int64_t>> lacking = {};  // by part; empty if nothing is lacking
  };
  std::vector<size_t> by_source(parts.size());
  std::iota(by_source.begin(), by_source.end(), size_t{0});
  const auto source_of = [&](size_t i) { return parts[by_source[i]].feature.source; };
  std::stable_sort(by_source.begin(), by_source.end(),
                   [&](size_t a, size_t b) { return parts[a].feature.source < parts[b].feature.source; });
  std::vector<Task> tasks;
  for (size_t first = 0, last = 0; first < parts.size(); first = last) {
    const int64_t source = source_of(first);
    while (last < parts.size() && source_of(last) == source) ++last;
    const int64_t end = bounds[static_cast<size_t>(source) + 1];
    for (int64_t at = bounds[static_cast<size_t>(source)]; at < end; at += kTogether)
      tasks.push_back({first, last, {at, std::min(at + kTogether, end)}});
  }
  const size_t width = key_bytes(bags);
  threads = threads_for(bags.count, kTogether, threads);
  ThreadPool::instance().run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
    auto& [first, last, at, lacking] = tasks[static_cast<size_t>(t)];
    const size_t begin = static_cast<size_t>(at.begin) * width;
    std::memcpy(static_cast<char*>(kept) + begin, static_cast<const char*>(bags.keys) + begin,
                static_cast<size_t>(at.end - at.begin) * width);
    std::shared_lock lock(indexes);
    for (size_t i = first; i < last; ++i) {
      const LookupPart& part = parts[by_source[i]];
      uint32_t* out = slots + part.feature.slot_list * bags.count;
      const int64_t lost = find_some(*part.index, kept, bags.narrow_keys, at, out);
      if (!lost) continue;
      lacking.resize(last - first);
      std::vector<int64_t>& positions = lacking[i - first];
      positions.reserve(static_cast<size_t>(lost));
      for (int64_t p = at.begin; p < at.end; ++p)
        if (out[p] == kNoSlot) positions.push_back(p);
    }
  });
  std::vector<Lacking> found(parts.size());
  for (size_t p = 0; p < parts.size(); ++p) found[p].shift = parts[p].feature.slot_list * bags.count;
  for (const Task& task : tasks)
    for (size_t i = 0; i < task.lacking.size(); ++i) {
      std::vector<int64_t>& all = found[by_source[task.first + i]].positions;
      all.insert(all.end(), task.lacking[i].begin(), task.lacking[i].end());
    }
  return found;
}

}  // namespace shoal
