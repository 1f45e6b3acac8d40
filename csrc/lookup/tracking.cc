#include "lookup/tracking.h"

#include <algorithm>
#include <array>

#include "base/thread_pool.h"

namespace shoal {

static constexpr uint64_t kBucketsPerTask = 4096;

namespace {

// Rows lie anywhere, so each is prefetched some entries before it is written.
class Ahead {
 public:
  explicit Ahead(const Rows& rows) : rows_(rows) {}

  void add(int64_t key, uint32_t slot) {
    __builtin_prefetch(&rows_.flags(rows_.tail(slot)), 1);
    __builtin_prefetch(&rows_.key(slot), 1);
    Entry& here = entries_[count_++ % kAhead];
    if (count_ > kAhead) write(here);
    here = {key, slot};
  }
  void finish() {
    for (size_t i = count_ > kAhead ? count_ - kAhead : 0; i < count_; ++i) write(entries_[i % kAhead]);
  }

 private:
  struct Entry {
    int64_t key;
    uint32_t slot;
  };
  static constexpr size_t kAhead = 16;

  void write(const Entry& entry) {
    rows_.key(entry.slot) = entry.key;
    rows_.flags(rows_.tail(entry.slot)) &= ~uint32_t{kChanged};
  }

  const Rows& rows_;
  std::array<Entry, kAhead> entries_;
  size_t count_ = 0;
};

}  // namespace

void begin_tracking(const Index& index, const Rows& rows, int threads) {
  const int64_t tasks = static_cast<int64_t>((index.extent() + kBucketsPerTask - 1) / kBucketsPerTask);
  ThreadPool::instance().run(tasks, threads, [&](int64_t task) {
    const uint64_t from = static_cast<uint64_t>(task) * kBucketsPerTask;
    Ahead ahead(rows);
    index.scan(from, from + kBucketsPerTask, [&](int64_t key, uint32_t slot) { ahead.add(key, slot); });
    ahead.finish();
  });
}

}  // namespace shoal
