#include "kernels/update.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "base/memory.h"
#include "base/thread_pool.h"
#include "kernels/sort.h"
#include "kernels/sums.h"

namespace shoal {

// A part is sorted in the first-level cache if that is needed to give all threads work, and else in the second: a table
// of one part needs no partition.
static constexpr int64_t kLeastPairs = 2048;   // 16 KiB
static constexpr int64_t kMostPairs = 32768;   // 256 KiB
static constexpr int64_t kPartsPerThread = 4;  // so that an uneven one does not keep all waiting
static constexpr int64_t kPartsToSum = 2;      // a thread; few, since each part walks all positions of its table
static constexpr int64_t kPairsPerChunk = 8192;
static constexpr int64_t kMaxParts = 1024;
static constexpr int64_t kLinePairs = 64 / sizeof(uint64_t);
// Rows of a table of so few slots are not sorted where their gradients were added up without a sort (forty tables, batch
// 512: .97 of the backward). With more, sorted ones are nearer to each other (1 M rows of 64 floats: .95 to .98).
static constexpr int64_t kMostUnsorted = 1 << 18;
// What a thread may take to add up the gradients of a table without a sort. Pages that no row needs stay untouched.
static constexpr int64_t kMostSumWords = (int64_t{64} << 20) / sizeof(uint64_t);

namespace {

// A stretch of one feature's positions, split among the parts of its table by one thread.
struct Chunk {
  int64_t table;
  const UpdateFeature* feature;
  int64_t begin, end;
  int64_t counts_at;  // its histogram, one number a part
};

struct TableParts {
  std::vector<GradientRow> features;
  int64_t positions = 0;
  int64_t parts = 0;
  int64_t first_part = 0;  // among all tables
  int shift = 0;           // slot >> shift = part
  bool direct = false;     // see UpdatePart
  bool summed = false;     // its gradients are added up without a sort; each part looks at all positions

  // Rows that a part can have: it is a range of slots.
  int64_t most_rows() const { return std::min(positions, int64_t{1} << shift); }
};

int64_t slot_count(const Rows& rows) { return static_cast<int64_t>(rows.slab_count) << rows.slot_bits; }

int shift_for(const Rows& rows, int64_t parts) {
  const int64_t top_slot = slot_count(rows) - 1;
  int shift = 0;
  while ((top_slot >> shift) >= parts) ++shift;
  return shift;
}

// The pair alone tells the row of a gradient if the table has one feature, all of whose gradients reach their rows with
// the same factor, and if no rounding needs the key.
bool is_direct(const UpdateTable& table, const std::vector<GradientRow>& features, const Bags& bags) {
  return features.size() == 1 && !bags.weights && features[0].feature->pooling != Pooling::mean &&
         table.rows->dtype == Dtype::f32;
}

// Words that adding up the gradients of so many rows takes at most.
int64_t sum_words(int64_t rows, int32_t dim) {
  const int64_t sums = (rows * dim + 1) / 2, first = (rows + 1) / 2;
  return sums + 2 * rows + first + sum_places(rows) + kLinePairs;
}

// The result does not depend on it, but for time.
bool is_summed(const UpdateTable& table, const std::vector<GradientRow>& features, int64_t positions,
               const Bags& bags) {
  return table.reduce == Reduce::sum && sum_words(positions, table.rows->dim) <= kMostSumWords &&
         keys_repeat(features.data(), static_cast<int64_t>(features.size()), bags);
}

// Room for all pairs, and for what a thread needs to sort a part, to add it up and to walk it: one buffer, as an
// allocation that fails after the first row has changed would leave half a step.
class Workspace {
 public:
  // Part p has pairs [part_begin[p], part_begin[p + 1]), or as much room where it has no pairs.
  Workspace(const std::vector<int64_t>& part_begin, int64_t scratch_floats, int64_t words_to_sum, int threads)
      : threads_at_(part_begin.back() + kLinePairs),
        scratch_at_(shared_pairs(part_begin)),
        sums_at_((scratch_at_ + (scratch_floats + 1) / 2 + kLinePairs) / kLinePairs * kLinePairs),
        // A line between the threads' areas, so that none is written by two.
        stride_((sums_at_ + words_to_sum + 2 * kLinePairs) / kLinePairs * kLinePairs),
        large_at_(part_begin.size() - 1, 0) {
    threads_at_ = (threads_at_ + kLinePairs) / kLinePairs * kLinePairs;
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
    return large ? memory_.get() + large : area(seat);
  }
  float* scratch(int seat) const { return reinterpret_cast<float*>(area(seat) + scratch_at_); }
  SumRoom sum_room(int64_t rows, int32_t dim, int seat) const {
    uint64_t* at = area(seat) + sums_at_;
    auto take = [&](int64_t words) { return std::exchange(at, at + words); };
    SumRoom room{};
    room.sums = reinterpret_cast<float*>(take((rows * dim + 1) / 2));
    room.places = take(sum_places(rows));
    room.rows = take(rows);
    room.spare = take(rows);
    room.first = reinterpret_cast<uint32_t*>(take((rows + 1) / 2));
    return room;
  }

 private:
  static int64_t shared_pairs(const std::vector<int64_t>& part_begin) {
    int64_t most = 0;
    for (size_t p = 1; p < part_begin.size(); ++p) most = std::max(most, part_begin[p] - part_begin[p - 1]);
    return std::min(most, kMostPairs);
  }
  uint64_t* area(int seat) const { return memory_.get() + threads_at_ + stride_ * seat; }

  int64_t threads_at_, scratch_at_, sums_at_, stride_;
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
  for (const UpdateFeature& feature : features) {
    int64_t first = feature.source * bags.batch;
    int64_t begin = bags.offset(first), end = bags.offset(first + bags.batch);
    TableParts& table = split[static_cast<size_t>(feature.table)];
    table.features.push_back({&feature, begin, end});
    table.positions += end - begin;
    positions = std::max(positions, feature.slot_list * bags.count + end);
  }
  std::vector<UpdateCounts> counts_of(tables.size());
  int64_t part_count = 0, work = 0;
  for (const TableParts& table : split) work += table.positions;
  if (work == 0) return counts_of;

  threads = threads_for(work, kLeastPairs, threads);
  const int64_t pairs_per_part = std::clamp(work / (threads * kPartsPerThread), kLeastPairs, kMostPairs);
  for (size_t t = 0; t < tables.size(); ++t) {
    TableParts& table = split[t];
    table.direct = is_direct(tables[t], table.features, bags);
    table.summed = is_summed(tables[t], table.features, table.positions, bags);
    if (table.summed)
      table.parts = std::clamp<int64_t>(kPartsToSum * threads * table.positions / work, 1, kPartsToSum * threads);
    else
      table.parts = std::clamp<int64_t>((table.positions + pairs_per_part / 2) / pairs_per_part, 1, kMaxParts);
    table.shift = shift_for(*tables[t].rows, table.parts);
    table.first_part = part_count;
    part_count += table.parts;
    if (table.summed) continue;
    for (const GradientRow& in : table.features)
      for (int64_t at = in.begin; at < in.end; at += kPairsPerChunk)
        chunks.push_back({static_cast<int64_t>(t), in.feature, at, std::min(at + kPairsPerChunk, in.end), 0});
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
    const uint32_t* slots = bags.slots_of(chunk.feature->slot_list);
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
  // A part that is summed has no pairs, only room for the slots that it changed.
  for (size_t t = 0; t < tables.size(); ++t)
    if (split[t].summed && tables[t].changed)
      for (int64_t p = 0; p < split[t].parts; ++p)
        part_begin[static_cast<size_t>(split[t].first_part + p) + 1] = (split[t].most_rows() + 1) / 2;
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
  const bool needs_bags =
      std::any_of(split.begin(), split.end(), [](const TableParts& table) { return !table.direct && !table.summed; });
  Kept<uint32_t> bag_of(needs_bags ? static_cast<size_t>(positions) : 0);
  int64_t scratch_floats = 0, words_to_sum = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int32_t dim = tables[t].rows->dim;
    scratch_floats = std::max(scratch_floats, update_scratch_floats(dim));
    if (split[t].summed) words_to_sum = std::max(words_to_sum, sum_words(split[t].most_rows(), dim));
  }
  Workspace workspace(part_begin, scratch_floats, words_to_sum, threads);
  uint64_t* pairs = workspace.pairs();
  pool.run(chunk_work, threads, [&](int64_t c) {
    const Chunk& chunk = chunks[static_cast<size_t>(c)];
    const TableParts& table = split[static_cast<size_t>(chunk.table)];
    const UpdateFeature& feature = *chunk.feature;
    const uint32_t* slots = bags.slots_of(feature.slot_list);
    int64_t* next = &count[static_cast<size_t>(chunk.counts_at)];
    const int64_t first = feature.source * bags.batch;
    auto put_all = [&](auto&& put) {
      if (!table.direct)
        for_each_position(bags, first, chunk.begin, chunk.end, [&](int64_t at, int64_t bag) {
          bag_of.get()[feature.slot_list * bags.count + at] = static_cast<uint32_t>(bag);
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
  for (size_t p = 0; p < part_work.size(); ++p) {
    const size_t t = static_cast<size_t>(table_of[p]);
    const int64_t n = split[t].summed ? split[t].positions / split[t].parts : part_begin[p + 1] - part_begin[p];
    part_work[p] = row_work(*tables[t].rows, n);
  }
  const UpdateKernel& kernel = update_kernel();
  // From here on rows change: nothing may throw.
  pool.run(part_work, threads, [&](int64_t p, int seat) {
    size_t t = static_cast<size_t>(table_of[static_cast<size_t>(p)]);
    const TableParts& table = split[t];
    UpdatePart part{
        &tables[t],   table.features.data(), static_cast<int64_t>(table.features.size()),
        table.direct, bag_of.get(),          tables[t].changed ? changed_of(static_cast<size_t>(p)) : nullptr};
    UpdateRows rows{};
    if (table.summed) {
      const int64_t number = p - table.first_part;
      const SumRoom room = workspace.sum_room(table.most_rows(), tables[t].rows->dim, seat);
      rows.count = sum_kernel().run(part, bags, {table.shift, static_cast<uint32_t>(number)}, room);
      const bool sorts = slot_count(*tables[t].rows) > kMostUnsorted;
      rows.rows = sorts ? sort_by_slot(room.rows, room.spare, rows.count, table.shift) : room.rows;
      rows.sums = room.sums;
      rows.first = room.first;
    } else {
      const int64_t begin = part_begin[static_cast<size_t>(p)];
      rows.count = part_begin[static_cast<size_t>(p) + 1] - begin;
      rows.sorted = sort_by_slot(pairs + begin, workspace.spare(p, seat), rows.count, table.shift);
    }
    if (rows.count == 0) return;
    UpdateCounts did = kernel.run(part, bags, rows, workspace.scratch(seat));
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
