#define SHOAL_ISA test
#include "kernels/pool.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/thread_pool.h"
#include "kernels/rows_io.h"
#include "kernels/vec.h"
#include "store/dram.h"

namespace shoal {
namespace {

void pool(const std::vector<PoolFeature>& features, const Bags& bags, Dtype out_dtype, int threads) {
  std::vector<PoolTask> tasks;
  for (const PoolFeature& feature : features) split_pool(feature, bags, &tasks);
  ThreadPool::instance().run(static_cast<int64_t>(tasks.size()), threads,
                             [&](int64_t t) { pool_task(tasks[static_cast<size_t>(t)], bags, out_dtype); });
}

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};
constexpr Pooling kPoolings[] = {Pooling::none, Pooling::sum, Pooling::mean};
constexpr int64_t kRows = 500;
const Init kMissing{InitKind::uniform, -1.0f, 2.0f, 99};

std::unique_ptr<DramStore> filled(int32_t dim, Dtype dtype) {
  auto store = std::make_unique<DramStore>(dim, dtype, 1);
  std::vector<uint32_t> slots(kRows);
  std::vector<int64_t> keys(kRows);
  for (int64_t i = 0; i < kRows; ++i) keys[static_cast<size_t>(i)] = i;
  CHECK(store->reserve(kRows).ok());
  store->take(slots.data(), kRows);
  const float state = 0;
  birth(store->rows(), {InitKind::normal, 0.0f, 1.0f, 5}, &state, {}, keys.data(), slots.data(), kRows, 1);
  return store;
}

// Bags of every interesting length, over `features` features; one key in ten has no row.
struct Batch {
  int64_t features, size;
  std::vector<int64_t> keys, offsets = {0};
  std::vector<int32_t> narrow_keys, narrow_offsets;
  std::vector<uint32_t> slots;
  std::vector<float> weights;

  Batch(uint64_t seed, int64_t feature_count, int64_t batch) : features(feature_count), size(batch) {
    Random random(seed);
    for (int64_t bag = 0; bag < features * size; ++bag) {
      constexpr int64_t kLengths[] = {0, 1, 2, 31, 32, 33, 64, 65, 3, 0};
      int64_t length = bag % 3 == 0 ? kLengths[random.below(10)] : random.below(12);
      for (int64_t i = 0; i < length; ++i) {
        bool missing = random.below(10) == 0;
        keys.push_back(random.below(kRows) + (missing ? kRows : 0));
        slots.push_back(missing ? kNoSlot : static_cast<uint32_t>(keys.back()));
        weights.push_back(random.unit() * 3);
      }
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    narrow_keys.assign(keys.begin(), keys.end());
    narrow_offsets.assign(offsets.begin(), offsets.end());
  }
  Bags bags(bool weighted, bool narrow = false) const {
    Bags bags;
    bags.keys = narrow ? static_cast<const void*>(narrow_keys.data()) : keys.data();
    bags.offsets = narrow ? static_cast<const void*>(narrow_offsets.data()) : offsets.data();
    bags.narrow_keys = bags.narrow_offsets = narrow;
    bags.batch = size;
    bags.slots = slots.data();
    bags.weights = weighted ? weights.data() : nullptr;
    return bags;
  }
};

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// One feature's output, one element after the other. Sums go in the order of the keys, so the kernels match it in
// every bit.
std::vector<float> expected(const Rows& rows, const Batch& batch, int64_t source, Pooling pooling, bool weighted) {
  const int32_t dim = rows.dim;
  std::vector<float> out, row(static_cast<size_t>(dim)), sum(static_cast<size_t>(dim));
  for (int64_t bag = 0; bag < batch.size; ++bag) {
    int64_t from = batch.offsets[static_cast<size_t>(source * batch.size + bag)];
    int64_t to = batch.offsets[static_cast<size_t>(source * batch.size + bag + 1)];
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t i = from; i < to; ++i) {
      size_t at = static_cast<size_t>(i);
      read_weights(rows, kMissing, &batch.keys[at], &batch.slots[at], 1, row.data(), 1);
      if (weighted)
        for (float& x : row) x *= batch.weights[at];
      if (pooling == Pooling::none) out.insert(out.end(), row.begin(), row.end());
      for (size_t j = 0; j < row.size(); ++j) sum[j] += row[j];
    }
    if (pooling == Pooling::none) continue;
    if (pooling == Pooling::mean && to > from)
      for (float& x : sum) x /= static_cast<float>(to - from);
    out.insert(out.end(), sum.begin(), sum.end());
  }
  return out;
}

std::vector<char> stored(Dtype dtype, const std::vector<float>& values) {
  std::vector<char> out(values.size() * static_cast<size_t>(bytes_of(dtype)));
  test::store_nearest(dtype, out.data(), static_cast<int32_t>(values.size()), values.data());
  return out;
}

// Runs one feature into rows wider than it needs, and checks every byte, those around it too.
void check_pool(const PoolFeature& feature, const Batch& batch, const Bags& bags, Dtype out_dtype, int threads,
                const std::vector<char>& wanted, const char* isa) {
  const int64_t width = feature.rows->dim * bytes_of(out_dtype), stride = width + 3 * bytes_of(out_dtype);
  const int64_t rows = static_cast<int64_t>(wanted.size()) / width;
  std::vector<char> out(static_cast<size_t>(stride * (rows + 1)), '\x7f');
  PoolFeature placed = feature;
  placed.out = out.data() + bytes_of(out_dtype);
  placed.stride = stride / bytes_of(out_dtype);
  pool({placed}, bags, out_dtype, threads);
  for (int64_t at = 0; at < static_cast<int64_t>(out.size()); ++at) {
    int64_t row = at / stride, column = at % stride - bytes_of(out_dtype);
    bool inside = row < rows && column >= 0 && column < width;
    char value = inside ? wanted[static_cast<size_t>(row * width + column)] : '\x7f';
    CHECK(out[static_cast<size_t>(at)] == value, isa, feature.rows->dim, static_cast<int>(feature.rows->dtype),
          static_cast<int>(feature.pooling), static_cast<int>(out_dtype), row, column, batch.size);
  }
}

void every_dtype_and_pooling_and_width_on_every_instruction_set() {
  Batch batch(1, 2, 30);
  for (int32_t dim : {1, 3, 15, 16, 17, 32, 64, 100, 128, 129})
    for (Dtype dtype : kDtypes) {
      auto store = filled(dim, dtype);
      for (Pooling pooling : kPoolings)
        for (bool weighted : {false, true}) {
          std::vector<float> wanted = expected(store->rows(), batch, 1, pooling, weighted);
          for (Dtype out_dtype : kDtypes) {
            std::vector<char> bytes = stored(out_dtype, wanted);
            for (const std::string& isa : available_isas()) {
              CHECK(set_isa(isa), isa);
              PoolFeature feature{&store->rows(), 1, pooling, false, kMissing, nullptr, 0};
              check_pool(feature, batch, batch.bags(weighted, dim % 2 == 0), out_dtype, 1, bytes, isa.c_str());
            }
          }
        }
    }
}

void the_number_of_threads_changes_nothing() {
  Batch batch(2, 3, 1000);
  for (Dtype dtype : kDtypes) {
    auto store = filled(24, dtype);
    for (Pooling pooling : kPoolings) {
      std::vector<char> wanted = stored(Dtype::f32, expected(store->rows(), batch, 2, pooling, true));
      PoolFeature feature{&store->rows(), 2, pooling, false, kMissing, nullptr, 0};
      for (int threads : {1, 2, 3, 7})
        check_pool(feature, batch, batch.bags(true), Dtype::f32, threads, wanted, isa_name(active_isa()));
    }
  }
}

void features_share_an_output_and_tables() {
  Batch batch(3, 4, 50);
  auto narrow = filled(5, Dtype::f32), wide = filled(70, Dtype::f16);
  constexpr int64_t kColumns = 5 + 70 + 70 + 5;
  std::vector<float> out(static_cast<size_t>(50 * kColumns), NAN);
  auto at = [&](int64_t column) { return reinterpret_cast<char*>(out.data() + column); };
  // Feature 3 first, feature 2 not at all.
  pool({{&narrow->rows(), 3, Pooling::sum, false, kMissing, at(0), kColumns},
        {&wide->rows(), 0, Pooling::mean, false, kMissing, at(5), kColumns},
        {&wide->rows(), 1, Pooling::sum, true, kMissing, at(75), kColumns},
        {&narrow->rows(), 1, Pooling::sum, false, kMissing, at(145), kColumns}},
       batch.bags(false), Dtype::f32, 2);
  auto check = [&](int64_t column, int64_t dim, const std::vector<float>& wanted) {
    for (int64_t bag = 0; bag < 50; ++bag)
      for (int64_t i = 0; i < dim; ++i) {
        float got = out[static_cast<size_t>(bag * kColumns + column + i)];
        CHECK(got == wanted[static_cast<size_t>(bag * dim + i)], column, bag, i, got);
      }
  };
  check(0, 5, expected(narrow->rows(), batch, 3, Pooling::sum, false));
  check(5, 70, expected(wide->rows(), batch, 0, Pooling::mean, false));
  check(75, 70, std::vector<float>(50 * 70, 0.0f));  // a feature that only writes
  check(145, 5, expected(narrow->rows(), batch, 1, Pooling::sum, false));
}

void a_feature_of_two_tables_has_slots_in_each() {
  Batch batch(6, 1, 40);
  auto first = filled(7, Dtype::f32), second = filled(7, Dtype::bf16);
  Bags bags = batch.bags(true);
  bags.count = static_cast<int64_t>(batch.keys.size());
  std::vector<uint32_t> slots = batch.slots;
  Batch other = batch;
  std::reverse(other.slots.begin(), other.slots.end());
  slots.insert(slots.end(), other.slots.begin(), other.slots.end());
  bags.slots = slots.data();
  for (Pooling pooling : kPoolings)
    for (int64_t slot_list : {0, 1}) {
      const Rows& rows = (slot_list ? second : first)->rows();
      std::vector<float> wanted = expected(rows, slot_list ? other : batch, 0, pooling, true), out(wanted.size(), NAN);
      pool({{&rows, 0, pooling, false, kMissing, reinterpret_cast<char*>(out.data()), 7, slot_list}}, bags, Dtype::f32,
           1);
      CHECK(out == wanted, slot_list, static_cast<int>(pooling));
    }
}

void missing_rows_may_read_as_zero() {
  auto store = filled(9, Dtype::bf16);
  Batch batch(4, 1, 20);
  std::fill(batch.slots.begin(), batch.slots.end(), kNoSlot);
  for (Pooling pooling : kPoolings) {
    std::vector<float> out(batch.keys.size() * 9 + 20 * 9, NAN);
    pool({{&store->rows(), 0, pooling, false, Init{}, reinterpret_cast<char*>(out.data()), 9}}, batch.bags(false),
         Dtype::f32, 1);
    size_t rows = pooling == Pooling::none ? batch.keys.size() : 20;
    for (size_t i = 0; i < rows * 9; ++i) CHECK(out[i] == 0.0f, i, out[i]);
    CHECK(std::isnan(out[rows * 9]));
  }
}

void an_empty_batch_and_empty_bags() {
  auto store = filled(6, Dtype::f32);
  Batch none(5, 2, 0);
  pool({{&store->rows(), 0, Pooling::sum, false, kMissing, nullptr, 6},
        {&store->rows(), 1, Pooling::none, false, kMissing, nullptr, 6}},
       none.bags(false), Dtype::f32, 4);
  pool({}, none.bags(false), Dtype::f32, 4);
  Bags bags;
  const int64_t offsets[4] = {};
  bags.offsets = offsets;
  bags.batch = 3;
  std::vector<float> out(18, NAN);
  for (Pooling pooling : {Pooling::sum, Pooling::mean}) {
    std::fill(out.begin(), out.end(), NAN);
    pool({{&store->rows(), 0, pooling, false, kMissing, reinterpret_cast<char*>(out.data()), 6}}, bags, Dtype::f32, 2);
    for (float x : out) CHECK(x == 0.0f, x);
  }
}

void bad_offsets_are_refused() {
  auto said = [](std::vector<int64_t> wide, int64_t batch, int64_t features, int64_t keys) {
    Bags bags;
    bags.batch = batch;
    bags.offsets = wide.data();
    Status status = check(bags, features, keys);
    std::vector<int32_t> narrow(wide.begin(), wide.end());
    bags.offsets = narrow.data();
    bags.narrow_offsets = true;
    CHECK(check(bags, features, keys).message() == status.message());
    CHECK(status.ok() || status.code() == Code::input);
    return status.message();
  };
  CHECK(said({0, 1, 1, 5, 6}, 2, 2, 6).empty());
  CHECK(said({0}, 0, 3, 0).empty());
  CHECK(said({1, 2, 3}, 2, 1, 3).find("begin at 0; got 1") != std::string::npos);
  CHECK(said({0, 4, 3, 5, 6}, 2, 2, 6).find("bag 1 of feature number 0 goes from 4 to 3") != std::string::npos);
  CHECK(said({0, 4, 5, 4, 6}, 2, 2, 6).find("bag 0 of feature number 1 goes from 5 to 4") != std::string::npos);
  CHECK(said({0, 4, 5}, 2, 1, 6).find("sum to 5, and there are 6") != std::string::npos);
  CHECK(said({0, -1, 5}, 2, 1, 5).find("goes from 0 to -1") != std::string::npos);
  CHECK(said({0}, 0, 1, 5).find("sum to 0, and there are 5") != std::string::npos);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::every_dtype_and_pooling_and_width_on_every_instruction_set();
  shoal::the_number_of_threads_changes_nothing();
  shoal::features_share_an_output_and_tables();
  shoal::a_feature_of_two_tables_has_slots_in_each();
  shoal::missing_rows_may_read_as_zero();
  shoal::an_empty_batch_and_empty_bags();
  shoal::bad_offsets_are_refused();
}
