#include "kernels/update.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "base/memory.h"
#include "base/thread_pool.h"
#include "kernels/sort.h"

namespace shoal {

// A part is sorted in the first-level cache if that is needed to give all threads work, and else in the second: a table
// of one part needs no partition.
static constexpr int64_t kLeastPairs = 2048;   // 16 KiB
static constexpr int64_t kMostPairs = 32768;   // 256 KiB
static constexpr int64_t kPartsPerThread = 4;  // so that an uneven one does not keep all waiting
static constexpr int64_t kPairsPerChunk = 8192;
static constexpr int64_t kMaxParts = 1024;
static constexpr int64_t kLinePairs = 64 / sizeof(uint64_t);

namespace {

// A stretch of one feature's positions, split among the parts of its table by one thread.
struct Chunk {
  int64_t table, feature, begin, end;
  int64_t counts_at;  // its histogram, one number a part
};

struct TableParts {
  std::vector<GradientRow> features;
  int64_t positions = 0;
  int64_t parts = 0;
  int64_t first_part = 0;  // among all tables
  int shift = 0;           // slot >> shift = part
  bool direct = false;     // see UpdatePart
};

int shift_for(const Rows& rows, int64_t parts) {
  int64_t top_slot = (static_cast<int64_t>(rows.slab_count) << rows.slot_bits) - 1;
  int shift = 0;
  while ((top_slot >> shift) >= parts) ++shift;
  return shift;
}

// A gradient's row follows from the pair alone if the table has one feature, whose gradients all reach their rows with the
// same factor, and no rounding that wants the key.
bool is_direct(const UpdateTable& table, const std::vector<GradientRow>& features, const Bags& bags) {
  return features.size() == 1 && !bags.weights && features[0].feature->pooling != Pooling::mean &&
         table.rows->dtype == Dtype::f32;
}

// Room for all pairs, and for what a thread needs to sort a part and to walk it: one buffer, as an allocation that fails
// after the first row has changed would leave half a step.
class Workspace {
 public:
  // Part p has pairs [part_begin[p], part_begin[p + 1]).
  Workspace(const std::vector<int64_t>& part_begin, int64_t scratch_floats, int threads)
      : threads_at_(part_begin.back() + kLinePairs),
        scratch_at_(shared_pairs(part_begin)),
        // A line between the threads' areas, so that none is written by two.
        stride_(scratch_at_ + (scratch_floats + 1) / 2 + kLinePairs),
        large_at_(part_begin.size() - 1, 0) {
    int64_t at = threads_at_ + stride_ * threads;
    for (size_t p = 0; p < large_at_.size(); ++p)
      if (int64_t n = part_begin[p + 1] - part_begin[p]; n > scratch_at_) {
        large_at_[p] = at;
        at += n;
      }
    memory_ = Kept<uint64_t>(static_cast<size_t>(at));
  }

  uint64_t* pairs() const { return memory_.get(); }
  // As many pairs as the part has. Those of a usual part lie in the thread's area, which stays in its cache.
  uint64_t* spare(int64_t part, int seat) const {
    int64_t large = large_at_[static_cast<size_t>(part)];
    return memory_.get() + (large ? large : threads_at_ + stride_ * seat);
  }
  float* scratch(int seat) const {
    return reinterpret_cast<float*>(memory_.get() + threads_at_ + stride_ * seat + scratch_at_);
  }

 private:
  static int64_t shared_pairs(const std::vector<int64_t>& part_begin) {
    int64_t most = 0;
    for (size_t p = 1; p < part_begin.size(); ++p) most = std::max(most, part_begin[p] - part_begin[p - 1]);
    return std::min(most, kMostPairs);
  }

  int64_t threads_at_, scratch_at_, stride_;
  std::vector<int64_t> large_at_;  // of parts that do not fit into a thread's area; 0 for the others
  Kept<uint64_t> memory_{0};
};

// body(position, bag) for the positions [begin, end) of a feature whose bags begin at `first`.
template <typename Body>
void for_each_position(const Bags& bags, int64_t first, int64_t begin, int64_t end, Body&& body) {
  // The bag of the first position: the last whose offset is not beyond it.
  int64_t low = 0, high = bags.batch;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    (bags.offset(first + middle) <= begin ? low : high) = middle;
  }
  for (int64_t bag = low, at = begin; at < end; ++bag)
    for (int64_t stop = std::min(bags.offset(first + bag + 1), end); at < stop; ++at) body(at, bag);
}

}  // namespace

std::vector<UpdateCounts> update(const std::vector<UpdateTable>& tables, const std::vector<UpdateFeature>& features,
                                 const Bags& bags, int threads) {
  ThreadPool& pool = ThreadPool::instance();
  std::vector<TableParts> split(tables.size());
  std::vector<Chunk> chunks;
  int64_t positions = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    const UpdateFeature& feature = features[f];
    int64_t first = feature.source * bags.batch;
    int64_t begin = bags.offset(first), end = bags.offset(first + bags.batch);
    TableParts& table = split[static_cast<size_t>(feature.table)];
    table.features.push_back({&feature, begin, end});
    table.positions += end - begin;
    positions = std::max(positions, feature.copy * bags.count + end);
    for (int64_t at = begin; at < end; at += kPairsPerChunk)
      chunks.push_back({feature.table, static_cast<int64_t>(f), at, std::min(at + kPairsPerChunk, end), 0});
  }
  std::vector<UpdateCounts> counts_of(tables.size());
  if (chunks.empty()) return counts_of;

  int64_t part_count = 0, work = 0;
  for (const TableParts& table : split) work += table.positions;
  threads = threads_for(work, kLeastPairs, threads);
  const int64_t pairs_per_part = std::clamp(work / (threads * kPartsPerThread), kLeastPairs, kMostPairs);
  for (size_t t = 0; t < tables.size(); ++t) {
    TableParts& table = split[t];
    table.parts = std::clamp<int64_t>((table.positions + pairs_per_part / 2) / pairs_per_part, 1, kMaxParts);
    table.shift = shift_for(*tables[t].rows, table.parts);
    table.first_part = part_count;
    table.direct = is_direct(tables[t], table.features, bags);
    part_count += table.parts;
  }
  int64_t counts = 0;
  for (Chunk& chunk : chunks) {
    chunk.counts_at = counts;
    counts += split[static_cast<size_t>(chunk.table)].parts;
  }

  // How many pairs of a chunk go to each part.
  std::vector<int64_t> count(static_cast<size_t>(counts), 0);
  std::vector<int64_t> chunk_work;
  for (const Chunk& chunk : chunks)
    chunk_work.push_back(row_work(*tables[static_cast<size_t>(chunk.table)].rows, chunk.end - chunk.begin));
  pool.run(chunk_work, threads, [&](int64_t c) {
    const Chunk& chunk = chunks[static_cast<size_t>(c)];
    const TableParts& table = split[static_cast<size_t>(chunk.table)];
    const int shift = table.shift;
    const uint32_t* slots = bags.slots_of(features[static_cast<size_t>(chunk.feature)].copy);
    int64_t* histogram = &count[static_cast<size_t>(chunk.counts_at)];
    if (table.parts == 1) {
      *histogram = chunk.end - chunk.begin - std::count(slots + chunk.begin, slots + chunk.end, kNoSlot);
      return;
    }
    for (int64_t at = chunk.begin; at < chunk.end; ++at)
      if (slots[at] != kNoSlot) ++histogram[static_cast<uint64_t>(slots[at]) >> shift];
  });

  // Where each part begins, and in it the pairs of each chunk, in order.
  std::vector<int64_t> part_begin(static_cast<size_t>(part_count) + 1, 0);
  for (const Chunk& chunk : chunks) {
    const TableParts& table = split[static_cast<size_t>(chunk.table)];
    for (int64_t p = 0; p < table.parts; ++p)
      part_begin[static_cast<size_t>(table.first_part + p) + 1] += count[static_cast<size_t>(chunk.counts_at + p)];
  }
  for (size_t p = 1; p < part_begin.size(); ++p) part_begin[p] += part_begin[p - 1];
  {
    std::vector<int64_t> next(part_begin.begin(), part_begin.end() - 1);
    for (const Chunk& chunk : chunks) {
      const TableParts& table = split[static_cast<size_t>(chunk.table)];
      for (int64_t p = 0; p < table.parts; ++p) {
        int64_t& here = count[static_cast<size_t>(chunk.counts_at + p)];
        here = std::exchange(next[static_cast<size_t>(table.first_part + p)],
                             next[static_cast<size_t>(table.first_part + p)] + here);
      }
    }
  }
  bool all_direct = std::all_of(split.begin(), split.end(), [](const TableParts& table) { return table.direct; });
  Kept<uint32_t> bag_of(all_direct ? 0 : static_cast<size_t>(positions));
  int64_t scratch_floats = 0;
  for (const UpdateTable& table : tables)
    scratch_floats = std::max(scratch_floats, update_scratch_floats(table.rows->dim));
  Workspace workspace(part_begin, scratch_floats, threads);
  uint64_t* pairs = workspace.pairs();
  pool.run(chunk_work, threads, [&](int64_t c) {
    const Chunk& chunk = chunks[static_cast<size_t>(c)];
    const TableParts& table = split[static_cast<size_t>(chunk.table)];
    const UpdateFeature& feature = features[static_cast<size_t>(chunk.feature)];
    const uint32_t* slots = bags.slots_of(feature.copy);
    int64_t* next = &count[static_cast<size_t>(chunk.counts_at)];
    const int64_t first = feature.source * bags.batch;
    auto put_all = [&](auto&& put) {
      if (!table.direct)
        for_each_position(bags, first, chunk.begin, chunk.end, [&](int64_t at, int64_t bag) {
          bag_of.get()[feature.copy * bags.count + at] = static_cast<uint32_t>(bag);
          put(slots[at], at);
        });
      else if (feature.pooling == Pooling::none)
        for (int64_t at = chunk.begin; at < chunk.end; ++at) put(slots[at], at - table.features[0].begin);
      else
        for_each_position(bags, first, chunk.begin, chunk.end, [&](int64_t at, int64_t bag) { put(slots[at], bag); });
    };
    auto pair = [](uint32_t slot, int64_t low) {
      return static_cast<uint64_t>(slot) << 32 | static_cast<uint64_t>(low);
    };
    if (table.parts == 1) {
      uint64_t* out = pairs + *next;
      put_all([&](uint32_t slot, int64_t low) {
        if (slot != kNoSlot) *out++ = pair(slot, low);
      });
    } else {
      put_all([&](uint32_t slot, int64_t low) {
        if (slot != kNoSlot) pairs[next[static_cast<uint64_t>(slot) >> table.shift]++] = pair(slot, low);
      });
    }
  });

  std::vector<int64_t> table_of(static_cast<size_t>(part_count));
  for (size_t t = 0; t < tables.size(); ++t)
    for (int64_t p = 0; p < split[t].parts; ++p)
      table_of[static_cast<size_t>(split[t].first_part + p)] = static_cast<int64_t>(t);
  std::vector<int64_t> changed(static_cast<size_t>(part_count), 0);  // slots, where the part's pairs were
  auto changed_of = [&](size_t p) { return reinterpret_cast<uint32_t*>(pairs + part_begin[p]); };
  for (size_t t = 0; t < tables.size(); ++t)
    if (tables[t].changed) tables[t].changed->expect(split[t].positions);
  std::vector<int64_t> part_work(static_cast<size_t>(part_count));
  for (size_t p = 0; p < part_work.size(); ++p)
    part_work[p] = row_work(*tables[static_cast<size_t>(table_of[p])].rows, part_begin[p + 1] - part_begin[p]);
  const UpdateKernel& kernel = update_kernel();
  // From here on rows change: nothing may throw.
  pool.run(part_work, threads, [&](int64_t p, int seat) {
    size_t t = static_cast<size_t>(table_of[static_cast<size_t>(p)]);
    int64_t begin = part_begin[static_cast<size_t>(p)], n = part_begin[static_cast<size_t>(p) + 1] - begin;
    if (n == 0) return;
    const uint64_t* sorted = sort_by_slot(pairs + begin, workspace.spare(p, seat), n, split[t].shift);
    UpdatePart part{&tables[t], split[t].features.data(), split[t].direct, bag_of.get(),
                    tables[t].changed ? changed_of(static_cast<size_t>(p)) : nullptr};
    UpdateCounts did = kernel.run(part, bags, sorted, n, workspace.scratch(seat));
    auto add = [](int64_t& total, int64_t n) { std::atomic_ref(total).fetch_add(n, std::memory_order_relaxed); };
    add(counts_of[t].rows, did.rows);
    add(counts_of[t].dropped, did.dropped);
    add(counts_of[t].nonfinite, did.nonfinite);
    add(counts_of[t].changed, did.changed);
    changed[static_cast<size_t>(p)] = did.changed;
  });
  for (size_t p = 0; p < changed.size(); ++p)
    if (changed[p]) tables[static_cast<size_t>(table_of[p])].changed->add_slots(changed_of(p), changed[p]);
  return counts_of;
}

void weight_gradients(const std::vector<const Rows*>& rows, const std::vector<UpdateFeature>& features,
                      const std::vector<Init>& missing, const Bags& bags, float* out, int threads) {
  constexpr int64_t kBagsPerTask = 64;
  // Features of the same keys, in several tables, add to the same numbers: one task does all of them.
  std::map<int64_t, std::vector<size_t>> by_source;
  for (size_t f = 0; f < features.size(); ++f) by_source[features[f].source].push_back(f);
  struct Task {
    const std::vector<size_t>* features;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  for (const auto& [source, same] : by_source)
    for (int64_t bag = 0; bag < bags.batch; bag += kBagsPerTask)
      tasks.push_back({&same, bag, std::min(bag + kBagsPerTask, bags.batch)});
  const UpdateKernel& kernel = update_kernel();
  ThreadPool::instance().run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
    const Task& task = tasks[static_cast<size_t>(t)];
    for (size_t f : *task.features) {
      auto scratch = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(update_scratch_floats(rows[f]->dim)));
      kernel.weight_gradients(features[f], *rows[f], missing[f], bags, task.begin, task.end, out, scratch.get());
    }
  });
}

bool all_finite(const float* data, int64_t rows, int64_t columns, int64_t stride, int threads) {
  if (rows == 0 || columns == 0) return true;
  constexpr int64_t kFloatsPerTask = 1 << 16;
  const UpdateKernel& kernel = update_kernel();
  if (stride == columns) {
    columns *= rows;
    rows = 1;
  }
  std::atomic<bool> finite{true};
  int64_t rows_per_task = std::max<int64_t>(1, kFloatsPerTask / columns);
  int64_t pieces = rows == 1 ? (columns + kFloatsPerTask - 1) / kFloatsPerTask : 1;
  int64_t tasks = (rows + rows_per_task - 1) / rows_per_task * pieces;
  ThreadPool::instance().run(tasks, threads, [&](int64_t task) {
    if (pieces > 1 || rows == 1) {
      int64_t begin = columns * task / pieces, end = columns * (task + 1) / pieces;
      if (!kernel.all_finite(data + begin, end - begin)) finite.store(false, std::memory_order_relaxed);
      return;
    }
    for (int64_t r = task * rows_per_task; r < std::min((task + 1) * rows_per_task, rows); ++r)
      if (!kernel.all_finite(data + r * stride, columns)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace shoal
