#include "kernels/pool.h"

#include <algorithm>
#include <memory>

namespace shoal {

int64_t split_pool(const PoolFeature& feature, const Bags& bags, std::vector<PoolTask>* tasks) {
  int64_t first = feature.source * bags.batch;
  int64_t keys = bags.offset(first + bags.batch) - bags.offset(first);
  int64_t rows = feature.pooling == Pooling::none ? keys : bags.batch;
  int64_t parts = std::max<int64_t>(1, std::min(rows, keys / kPoolTaskRows));
  for (int64_t part = 0; part < parts && rows > 0; ++part)
    tasks->push_back({&feature, rows * part / parts, rows * (part + 1) / parts});
  return keys;
}

static std::unique_ptr<float[]> scratch_of(const PoolTask& task) {
  const int64_t floats = pool_scratch_floats(task.feature->rows->dim);
  return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(floats));
}

void pool_task(const PoolTask& task, const Bags& bags, Dtype out_dtype) {
  const std::unique_ptr<float[]> scratch = scratch_of(task);
  pool_kernel().run(*task.feature, bags, out_dtype, task.begin, task.end, scratch.get());
}

int64_t find_and_pool_task(const PoolTask& task, const Bags& bags, const FindTask& find, Dtype out_dtype) {
  const std::unique_ptr<float[]> scratch = scratch_of(task);
  return static_cast<int64_t>(pool_kernel().find_and_run(task, bags, find, out_dtype, scratch.get()));
}

}  // namespace shoal
