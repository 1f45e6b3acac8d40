#include "kernels/pool.h"

#include <algorithm>
#include <memory>

#include "base/thread_pool.h"

namespace shoal {

// About as many rows as hide a task's start; the features of a step then split into a few tasks a thread.
static constexpr int64_t kRowsPerTask = 2048;

void pool(const std::vector<PoolFeature>& features, const Bags& bags, Dtype out_dtype, int threads) {
  struct Task {
    const PoolFeature* feature;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  int64_t work = 0;
  for (const PoolFeature& feature : features) {
    int64_t first = feature.source * bags.batch;
    int64_t keys = bags.offset(first + bags.batch) - bags.offset(first);
    work += keys;
    int64_t rows = feature.pooling == Pooling::none ? keys : bags.batch;
    int64_t parts = std::max<int64_t>(1, std::min(rows, keys / kRowsPerTask));
    for (int64_t part = 0; part < parts && rows > 0; ++part)
      tasks.push_back({&feature, rows * part / parts, rows * (part + 1) / parts});
  }
  const PoolKernel& kernel = pool_kernel();
  threads = threads_for(work, kRowsPerTask, threads);
  ThreadPool::instance().run(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
    const Task& task = tasks[t];
    auto scratch =
        std::make_unique_for_overwrite<float[]>(static_cast<size_t>(pool_scratch_floats(task.feature->rows->dim)));
    kernel.run(*task.feature, bags, out_dtype, task.begin, task.end, scratch.get());
  });
}

}  // namespace shoal
