#define SHOAL_ISA test
#include "kernels/update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/failing_heap.h"
#include "kernels/rounding_isa.h"
#include "kernels/rows_io.h"
#include "kernels/update_fixture_test.h"

namespace shoal {
namespace {

UpdateTable sgd(const Table& table) {
  UpdateTable update;
  update.rows = &table.rows();
  update.hyper.lr = 0.1f;
  update.score = 3;
  return update;
}

void check_sgd(const UpdateTable& settings, int32_t dim, bool weighted, const std::vector<Pooling>& poolings,
               int64_t batch_size) {
  Table table(dim, Dtype::f32, 700, 0);
  Batch batch(static_cast<uint64_t>(dim), batch_size, 8, dim, poolings,
              std::vector<const Table*>(poolings.size(), &table));
  // What the loss did not touch: outputs whose gradients are zeros, between others and past the rows' width.
  for (std::vector<float>& grads : batch.grads)
    for (size_t at = 0; at < grads.size(); at += static_cast<size_t>(3 * batch.stride))
      std::fill_n(grads.begin() + static_cast<int64_t>(at), dim, at % 2 ? 0.0f : -0.0f);
  for (size_t i = 0; i < batch.weights.size(); i += 5) batch.weights[i] = 0;
  UpdateTable update_table = settings;
  update_table.rows = &table.rows();
  ChangedRows changed;
  update_table.changed = &changed;
  std::vector<UpdateFeature> features;
  Naive naive;
  for (size_t f = 0; f < poolings.size(); ++f) {
    features.push_back(batch.feature(f, 0));
    naive.add(batch, f, dim, weighted, settings.grad_scale, settings.reduce);
  }
  std::map<uint32_t, std::vector<double>> wanted;
  for (size_t row = 0; row < table.slots.size(); ++row) {
    uint32_t slot = table.slots[row];
    const float* w = table.weights(static_cast<int64_t>(row));
    wanted[slot] = naive.gradient.count(slot) ? naive.step(update_table, slot, w) : std::vector<double>(w, w + dim);
  }
  std::vector<UpdateCounts> counts = update({update_table}, features, batch.bags(weighted), 2);
  CHECK(counts.size() == 1 && counts[0].rows == static_cast<int64_t>(naive.gradient.size()), counts[0].rows);
  CHECK(counts[0].dropped == 0 && counts[0].nonfinite == 0);
  for (size_t row = 0; row < table.slots.size(); ++row) {
    uint32_t slot = table.slots[row];
    const float* w = table.weights(static_cast<int64_t>(row));
    double scale = naive.count.count(slot) ? 1.0 + static_cast<double>(naive.count.at(slot)) : 1.0;
    for (int32_t i = 0; i < dim; ++i) {
      double want = wanted[slot][static_cast<size_t>(i)];
      CHECK(std::fabs(w[i] - want) < 1e-6 * scale, dim, weighted, row, i, w[i], want);
    }
    bool touched = naive.gradient.count(slot) != 0;
    CHECK(table.flags(static_cast<int64_t>(row)) == (touched ? kChanged | kDirty : 0u), row);
    CHECK(table.rows().score(table.rows().tail(slot)) == (touched ? 3.0 : 0.0), row);
  }
  // Each row is heard of once, until its flag is cleared.
  std::vector<uint32_t> heard = changed.take_slots(), touched;
  for (const auto& [slot, gradient] : naive.gradient) touched.push_back(slot);
  std::sort(heard.begin(), heard.end());
  CHECK(heard == touched && counts[0].changed == counts[0].rows, heard.size(), touched.size());
  update({update_table}, features, batch.bags(weighted), 2);
  CHECK(changed.take_slots().empty());
  clear_flags(table.rows(), &touched.back(), 1, kChanged);
  update({update_table}, features, batch.bags(weighted), 2);
  CHECK(changed.take_slots() == std::vector<uint32_t>{touched.back()});
}

void sgd_agrees_with_a_double_loop() {
  const std::vector<Pooling> all = {Pooling::sum, Pooling::mean, Pooling::none};
  for (int32_t dim : {1, 3, 15, 16, 17, 32, 64, 100, 128, 129})
    for (bool weighted : {false, true}) {
      UpdateTable plain;
      plain.hyper.lr = 0.1f;
      plain.score = 3;
      for (Pooling pooling : all) check_sgd(plain, dim, weighted, {pooling}, 100);
      // Several features on one table.
      check_sgd(plain, dim, weighted, {Pooling::sum, Pooling::none, Pooling::mean, Pooling::sum}, 60);

      UpdateTable all_settings = plain;
      all_settings.grad_scale = 0.5f;
      all_settings.weight_decay = 0.01f;
      all_settings.shrink = 0.99f;
      all_settings.max_norm = 0.6f * std::sqrt(static_cast<float>(dim));
      for (Reduce how : {Reduce::sum, Reduce::mean, Reduce::first, Reduce::last}) {
        all_settings.reduce = how;
        all_settings.clip_value = 0.3f;
        all_settings.clip_norm = 0;
        check_sgd(all_settings, dim, weighted, all, 50);
        all_settings.clip_value = 0;
        all_settings.clip_norm = 0.4f;
        check_sgd(all_settings, dim, weighted, all, 50);
      }
    }
}

void large_batches_agree_too() {
  UpdateTable plain;
  plain.hyper.lr = 0.1f;
  plain.score = 3;
  // Many parts and many chunks.
  check_sgd(plain, 16, true, {Pooling::sum, Pooling::mean, Pooling::none}, 5000);
}

int32_t state_floats(Optimizer optimizer, int32_t dim) {
  switch (optimizer) {
    case Optimizer::sgd:
    case Optimizer::assign: return 0;
    case Optimizer::rowwise_adagrad: return 1;
    case Optimizer::momentum:
    case Optimizer::adagrad: return dim;
    case Optimizer::ftrl: return 2 * dim;
    case Optimizer::adam: return 2 * dim + 1;
    case Optimizer::partial_rowwise_adam: return dim + 2;
  }
  return 0;
}

Hyper hyper_of(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::momentum: return {0.1f, {0.9f, 1.0f}};
    case Optimizer::adagrad:
    case Optimizer::rowwise_adagrad: return {0.1f, {1e-8f}};
    case Optimizer::adam:
    case Optimizer::partial_rowwise_adam: return {0.01f, {0.9f, 0.999f, 1e-8f, 0.0f, 0.0f}};
    case Optimizer::ftrl: return {0.1f, {0.001f, 0.01f, 1.0f}};
    default: return {0.1f, {}};
  }
}

// The bytes of two tables after two steps over three features.
std::string after_two_steps(Optimizer optimizer, Reduce how, int32_t dim, Dtype dtype, const std::string& isa,
                            int threads) {
  CHECK(set_isa(isa), isa);
  Table first(dim, dtype, 3000, state_floats(optimizer, dim)), second(dim, dtype, 40, state_floats(optimizer, dim));
  std::vector<UpdateTable> tables(2);
  for (size_t t = 0; t < 2; ++t) {
    tables[t].rows = t == 0 ? &first.rows() : &second.rows();
    tables[t].optimizer = optimizer;
    tables[t].reduce = how;
    tables[t].hyper = hyper_of(optimizer);
    tables[t].rounding_stream = 17 + t;
    tables[t].clip_norm = 5;
    tables[t].max_norm = 20;
  }
  for (uint64_t step = 0; step < 2; ++step) {
    Batch batch(step, 700, 12, dim, {Pooling::sum, Pooling::mean, Pooling::none}, {&first, &second, &first});
    for (UpdateTable& table : tables) {
      table.step = step;
      table.score = static_cast<double>(step);
    }
    update(tables, {batch.feature(0, 0), batch.feature(1, 1), batch.feature(2, 0)}, batch.bags(true), threads);
  }
  return first.snapshot() + second.snapshot();
}

void rows_are_the_same_for_any_threads_and_instruction_set() {
  const std::string best = available_isas().back();
  for (Optimizer optimizer : {Optimizer::sgd, Optimizer::momentum, Optimizer::adagrad, Optimizer::rowwise_adagrad,
                              Optimizer::adam, Optimizer::partial_rowwise_adam, Optimizer::ftrl, Optimizer::assign})
    for (auto [dim, dtype] :
         {std::pair{5, Dtype::f16}, {32, Dtype::bf16}, {5, Dtype::f32}, {64, Dtype::f32}, {100, Dtype::f32}}) {
      Reduce how = optimizer == Optimizer::assign ? Reduce::last : Reduce::sum;
      std::string wanted = after_two_steps(optimizer, how, dim, dtype, best, 1);
      for (int threads : {2, 3, 7})
        CHECK(after_two_steps(optimizer, how, dim, dtype, best, threads) == wanted, static_cast<int>(optimizer), dim,
              static_cast<int>(dtype), threads);
      for (const std::string& isa : available_isas())
        CHECK(after_two_steps(optimizer, how, dim, dtype, isa, 2) == wanted, static_cast<int>(optimizer), dim,
              static_cast<int>(dtype), isa);
    }
}

void sixteen_bit_rows_round_by_their_own_draws() {
  for (const std::string& isa : available_isas())
    for (Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      CHECK(set_isa(isa), isa);
      constexpr int32_t kDim = 70;
      Table table(kDim, dtype, 50, 0);
      std::vector<int64_t> offsets;
      for (int64_t i = 0; i <= 50; ++i) offsets.push_back(i);
      std::vector<float> grads;
      Random random(8);
      for (int i = 0; i < 50 * kDim; ++i) grads.push_back(random.unit());
      Bags bags;
      bags.keys = table.keys.data();
      bags.offsets = offsets.data();
      bags.batch = 50;
      bags.slots = table.slots.data();
      UpdateTable settings = sgd(table);
      settings.optimizer = Optimizer::assign;
      settings.rounding_stream = 1234;
      settings.step = (uint64_t{7} << 32) + 5;
      update({settings}, {{0, 0, Pooling::sum, grads.data(), kDim}}, bags, 2);
      for (int64_t row = 0; row < 50; ++row) {
        std::vector<char> wanted(2 * kDim);
        test::store_stochastic(dtype, wanted.data(), kDim, &grads[static_cast<size_t>(row * kDim)], 1234, row,
                               settings.step);
        CHECK(std::equal(wanted.begin(), wanted.end(), table.rows().weights(table.slots[static_cast<size_t>(row)])),
              isa, row);
      }
    }
}

void the_gradient_of_an_erased_row_is_dropped() {
  Table table(8, Dtype::f32, 100, 0);
  Batch batch(1, 300, 8, 8, {Pooling::sum}, {&table});
  std::vector<uint32_t> erased = {table.slots[0], table.slots[7], table.slots[50], table.slots[99]};
  set_flags(table.rows(), erased.data(), 4, kErased);
  int64_t used = 0, used_erased = 0;
  for (uint32_t slot : table.slots)
    if (std::count(batch.slots.begin(), batch.slots.end(), slot)) {
      ++used;
      used_erased += std::count(erased.begin(), erased.end(), slot);
    }
  CHECK(used_erased > 0);
  std::string before = table.snapshot();
  std::vector<UpdateCounts> counts = update({sgd(table)}, {batch.feature(0, 0)}, batch.bags(false), 2);
  CHECK(counts[0].dropped == used_erased && counts[0].rows == used - used_erased, counts[0].dropped, counts[0].rows);
  std::string after = table.snapshot();
  size_t row_bytes = before.size() / 100;
  for (size_t row : {0, 7, 50, 99})
    CHECK(before.compare(row * row_bytes, row_bytes, after, row * row_bytes, row_bytes) == 0, row);
}

void sums_that_overflow_leave_their_row_alone() {
  constexpr float kLarge = 3e38f;
  Table table(20, Dtype::f32, 4, 0);
  // Row 0 twice, row 1 once with a weight that overflows, row 2 once as it is, row 3 twice with opposite signs.
  const int64_t keys[6] = {0, 1, 0, 2, 3, 3}, offsets[7] = {0, 1, 2, 3, 4, 5, 6};
  const float weights[6] = {1, 100, 1, 1, 1, -1};
  std::vector<uint32_t> slots;
  for (int64_t key : keys) slots.push_back(table.slots[static_cast<size_t>(key)]);
  std::vector<float> grads(6 * 20, 1.0f);
  for (int position : {0, 1, 2, 4, 5}) grads[static_cast<size_t>(20 * position + 19)] = kLarge;
  Bags bags;
  bags.keys = keys;
  bags.offsets = offsets;
  bags.batch = 6;
  bags.slots = slots.data();
  bags.weights = weights;
  std::string before = table.snapshot();
  for (const std::string& isa : available_isas()) {
    CHECK(set_isa(isa), isa);
    std::vector<UpdateCounts> counts = update({sgd(table)}, {{0, 0, Pooling::sum, grads.data(), 20}}, bags, 1);
    CHECK(counts[0].nonfinite == 2 && counts[0].rows == 2, isa, counts[0].nonfinite, counts[0].rows);
    size_t two_rows = before.size() / 2;
    CHECK(before.compare(0, two_rows, table.snapshot(), 0, two_rows) == 0, isa);
  }
}

void nothing_happens_without_positions() {
  Table table(8, Dtype::f32, 10, 0);
  std::string before = table.snapshot();
  Batch none(1, 0, 1, 8, {Pooling::sum, Pooling::none}, {&table, &table});
  std::vector<UpdateCounts> counts =
      update({sgd(table), sgd(table)}, {none.feature(0, 0), none.feature(1, 1)}, none.bags(false), 3);
  CHECK(counts.size() == 2 && counts[0].rows == 0 && counts[1].rows == 0);
  Batch empty_bags(1, 40, 0, 8, {Pooling::mean}, {&table});
  CHECK(update({sgd(table)}, {empty_bags.feature(0, 0)}, empty_bags.bags(false), 3)[0].rows == 0);
  CHECK(update({sgd(table)}, {}, none.bags(false), 3)[0].rows == 0);
  CHECK(update({}, {}, none.bags(false), 3).empty());
  // Keys without a row get no gradient.
  Batch missing(1, 3000, 8, 8, {Pooling::sum}, {&table});
  std::fill(missing.slots.begin(), missing.slots.end(), kNoSlot);
  CHECK(update({sgd(table)}, {missing.feature(0, 0)}, missing.bags(false), 3)[0].rows == 0);
  CHECK(table.snapshot() == before);
}

void a_batch_of_one_key() {
  Table table(32, Dtype::f32, 5000, 0);
  // 50000 gradients of ones for one row, far from the first.
  constexpr int64_t kTimes = 50000;
  std::vector<int64_t> keys(kTimes, 4321), offsets = {0, kTimes};
  std::vector<uint32_t> slots(kTimes, table.slots[4321]);
  std::vector<float> ones(32, 1.0f);
  Bags bags;
  bags.keys = keys.data();
  bags.offsets = offsets.data();
  bags.batch = 1;
  bags.slots = slots.data();
  float before = table.weights(4321)[31];
  std::vector<UpdateCounts> counts = update({sgd(table)}, {{0, 0, Pooling::sum, ones.data(), 32}}, bags, 3);
  CHECK(counts[0].rows == 1, counts[0].rows);
  float wanted = before - 0.1f * static_cast<float>(kTimes);
  CHECK(table.weights(4321)[31] == wanted, table.weights(4321)[31], wanted);
}

void weight_gradients_are_row_times_gradient() {
  Init missing{InitKind::constant, 0.5f, 0.0f, 0};
  for (const std::string& isa : available_isas())
    for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
      for (int32_t dim : {1, 17, 64, 100}) {
        CHECK(set_isa(isa), isa);
        Table table(dim, dtype, 100, 0);
        const std::vector<Pooling> poolings = {Pooling::sum, Pooling::none, Pooling::mean};
        Batch batch(3, 150, 6, dim, poolings, {&table, &table, &table});
        std::vector<float> out(batch.keys.size(), 0.5f),
            row(static_cast<size_t>(dim));  // they are added to what is there
        std::vector<UpdateFeature> features;
        for (size_t f = 0; f < 3; ++f) features.push_back(batch.feature(f, -1));
        weight_gradients({&table.rows(), &table.rows(), &table.rows()}, features, {missing, missing, missing},
                         batch.bags(true), out.data(), 3);
        for (size_t f = 0; f < 3; ++f)
          for (size_t bag = 0; bag < 150; ++bag) {
            int64_t from = batch.offsets[150 * f + bag], to = batch.offsets[150 * f + bag + 1];
            for (int64_t i = from; i < to; ++i) {
              size_t at = static_cast<size_t>(i);
              read_weights(table.rows(), missing, &batch.keys[at], &batch.slots[at], 1, row.data(), 1);
              size_t output = poolings[f] == Pooling::none ? at - static_cast<size_t>(batch.offsets[150 * f]) : bag;
              double wanted = 0;
              for (size_t j = 0; j < row.size(); ++j)
                wanted += static_cast<double>(row[j]) * batch.grads[f][output * static_cast<size_t>(batch.stride) + j];
              if (poolings[f] == Pooling::mean) wanted /= static_cast<double>(to - from);
              CHECK(std::fabs(out[at] - 0.5 - wanted) < 1e-5, isa, dim, f, i, out[at], wanted);
            }
          }
      }
}

void the_last_position_counts() {
  // One position, and one more than a whole number of the pieces a batch is split into.
  for (int64_t positions : {1, 2, 2049, 8193}) {
    Table table(4, Dtype::f32, 10000, 0);
    std::vector<int64_t> offsets = {0, positions};
    std::vector<float> ones(4, 1.0f);
    Bags bags;
    bags.keys = table.keys.data();
    bags.offsets = offsets.data();
    bags.batch = 1;
    bags.slots = table.slots.data();
    std::vector<UpdateCounts> counts = update({sgd(table)}, {{0, 0, Pooling::sum, ones.data(), 4}}, bags, 2);
    CHECK(counts[0].rows == positions, counts[0].rows, positions);
    CHECK(table.flags(positions - 1) != 0 && table.flags(positions) == 0, positions);
  }
}

// One feature that feeds two tables has a slot list for each, one after the other.
void a_feature_of_two_tables_updates_both() {
  Table first(12, Dtype::f32, 50, 0), second(12, Dtype::f32, 80, 0), first_alone(12, Dtype::f32, 50, 0),
      second_alone(12, Dtype::f32, 80, 0);
  Batch batch(1, 200, 5, 12, {Pooling::sum, Pooling::mean}, {&first, &first});
  std::vector<uint32_t> slots = batch.slots, other;
  for (int64_t key : batch.keys) other.push_back(key == 3 ? kNoSlot : second.slots[static_cast<size_t>(key + 20)]);
  slots.insert(slots.end(), other.begin(), other.end());
  Bags bags = batch.bags(true);
  bags.slots = slots.data();
  bags.count = static_cast<int64_t>(batch.keys.size());
  std::vector<UpdateFeature> features = {batch.feature(0, 0), batch.feature(1, 1), batch.feature(1, 0)};
  features[1].slot_list = 1;
  update({sgd(first), sgd(second)}, features, bags, 2);

  update({sgd(first_alone)}, {batch.feature(0, 0), batch.feature(1, 0)}, batch.bags(true), 2);
  CHECK(first.snapshot() == first_alone.snapshot());
  batch.slots = other;
  update({sgd(second_alone)}, {batch.feature(1, 0)}, batch.bags(true), 2);
  CHECK(second.snapshot() == second_alone.snapshot());

  Init missing;
  std::vector<float> both(batch.keys.size(), 0.0f), one(batch.keys.size(), 0.0f);
  weight_gradients({&first.rows(), &second.rows(), &first.rows()}, features, {missing, missing, missing}, bags,
                   both.data(), 3);
  Bags only = bags;
  weight_gradients({&second.rows()}, {features[1]}, {missing}, only, one.data(), 1);
  weight_gradients({&first.rows()}, {features[2]}, {missing}, only, one.data(), 1);
  weight_gradients({&first.rows()}, {features[0]}, {missing}, only, one.data(), 1);
  CHECK(both == one);
}

void all_finite_sees_every_element() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  for (const std::string& isa : available_isas())
    for (int64_t columns : {1, 3, 16, 17, 100})
      for (int64_t gap : {0, 5}) {
        CHECK(set_isa(isa), isa);
        constexpr int64_t kRows = 37;
        int64_t stride = columns + gap;
        std::vector<float> data(static_cast<size_t>(kRows * stride), 3e38f);
        if (gap)  // what lies between the columns does not count
          for (int64_t r = 0; r < kRows; ++r) data[static_cast<size_t>(r * stride + columns)] = kNan;
        CHECK(all_finite(data.data(), kRows, columns, stride, 2), isa, columns, gap);
        for (int64_t r = 0; r < kRows; ++r)
          for (int64_t c = 0; c < columns; c += r % 5 == 0 ? 1 : 13)
            for (float bad : {kNan, kInfinity, -kInfinity}) {
              float& element = data[static_cast<size_t>(r * stride + c)];
              element = bad;
              CHECK(!all_finite(data.data(), kRows, columns, stride, 2), isa, columns, gap, r, c, bad);
              element = -3e38f;
            }
      }
  std::vector<float> large(300000, 1.0f);
  for (int threads : {1, 3}) {
    CHECK(all_finite(large.data(), 3000, 100, 100, threads) && all_finite(large.data(), 1, 300000, 300000, threads));
    for (size_t at : {size_t{0}, size_t{65535}, size_t{65536}, size_t{200001}, size_t{299999}}) {
      large[at] = kInfinity;
      CHECK(!all_finite(large.data(), 3000, 100, 100, threads) &&
            !all_finite(large.data(), 1, 300000, 300000, threads));
      CHECK(!all_finite(large.data(), 3000, 100, 100, threads), at);
      large[at] = 0.0f;
    }
    CHECK(all_finite(large.data(), 1500, 150, 200, threads));
    CHECK(all_finite(large.data(), 10, 300000, 0, threads));  // one row, many times
  }
  CHECK(all_finite(nullptr, 0, 5, 5, 2) && all_finite(nullptr, 5, 0, 0, 2));
}

// A table of more than 2^31 slots, of which only the last slab is there.
void slots_may_use_all_their_bits() {
  Table real(1, Dtype::f32, 100, 0);
  Rows rows = real.rows();
  uint32_t slabs = 1u << (32 - rows.slot_bits);
  std::vector<char*> pointers(slabs, nullptr);
  pointers[slabs - 2] = rows.slabs[0];
  rows.slabs = pointers.data();
  rows.slab_count = slabs;
  std::vector<int64_t> keys, offsets = {0};
  std::vector<uint32_t> slots;
  for (int64_t i = 0; i < 100; ++i) {
    keys.push_back(i);
    slots.push_back((slabs - 2) << rows.slot_bits | real.slots[static_cast<size_t>(i)]);
    offsets.push_back(i + 1);
  }
  std::vector<float> grad(100), before;
  for (int64_t i = 0; i < 100; ++i) {
    grad[static_cast<size_t>(i)] = static_cast<float>(i);
    before.push_back(real.weights(i)[0]);
  }
  Bags bags;
  bags.keys = keys.data();
  bags.offsets = offsets.data();
  bags.batch = bags.count = 100;
  bags.slots = slots.data();
  UpdateTable table;
  table.rows = &rows;
  table.hyper.lr = 1.0f;
  CHECK(update({table}, {{0, 0, Pooling::sum, grad.data(), 1}}, bags, 2)[0].rows == 100);
  for (int64_t i = 0; i < 100; ++i)
    CHECK(real.weights(i)[0] == before[static_cast<size_t>(i)] - static_cast<float>(i), i);
}

void an_update_without_memory_changes_no_row() {
  for (int threads : {1, 2, 4})
    for (bool weighted : {false, true}) {
      Table one(16, Dtype::f32, 50000, 16), two(16, Dtype::bf16, 3000, 16);
      Batch batch(11, 4000, 10, 16, {Pooling::sum, Pooling::mean}, {&one, &two});
      std::vector<UpdateTable> tables(2);
      tables[0].rows = &one.rows();
      tables[1].rows = &two.rows();
      for (UpdateTable& table : tables) {
        table.optimizer = Optimizer::adagrad;
        table.hyper.lr = 0.1f;
      }
      std::vector<UpdateFeature> features = {batch.feature(0, 0), batch.feature(1, 1)};
      std::string before = one.snapshot() + two.snapshot();
      for (int64_t allocations = 0;; ++allocations) {
        CHECK(allocations < 1000);
        if (with_heap_for(allocations, [&] { update(tables, features, batch.bags(weighted), threads); })) break;
        CHECK(one.snapshot() + two.snapshot() == before, threads, weighted, allocations);
      }
      CHECK(one.snapshot() + two.snapshot() != before);
    }
}

// All gradients for one row of many: a part that fits into no thread's area.
void a_part_may_hold_the_whole_batch() {
  constexpr int32_t kDim = 4;
  constexpr int64_t kBags = 40000;
  for (int threads : {1, 3}) {
    Table table(kDim, Dtype::f32, 200000, 0);
    std::vector<int64_t> keys(kBags, 7), offsets;
    std::vector<uint32_t> slots(kBags, table.slots[7]);
    slots[5] = table.slots[9];
    slots[6] = table.slots[199999];
    for (int64_t i = 0; i <= kBags; ++i) offsets.push_back(i);
    std::vector<float> grad(kBags * kDim, 1.0f);
    Bags bags;
    bags.keys = keys.data();
    bags.offsets = offsets.data();
    bags.batch = kBags;
    bags.slots = slots.data();
    UpdateTable settings;
    settings.rows = &table.rows();
    settings.hyper.lr = 1.0f;
    float hot = table.weights(7)[0], cold = table.weights(9)[1], last = table.weights(199999)[2];
    update({settings}, {{0, 0, Pooling::sum, grad.data(), kDim}}, bags, threads);
    CHECK(table.weights(7)[0] == hot - static_cast<float>(kBags - 2), table.weights(7)[0]);
    CHECK(table.weights(9)[1] == cold - 1.0f && table.weights(199999)[2] == last - 1.0f);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::slots_may_use_all_their_bits();
  shoal::sgd_agrees_with_a_double_loop();
  shoal::large_batches_agree_too();
  shoal::rows_are_the_same_for_any_threads_and_instruction_set();
  shoal::sixteen_bit_rows_round_by_their_own_draws();
  shoal::the_gradient_of_an_erased_row_is_dropped();
  shoal::sums_that_overflow_leave_their_row_alone();
  shoal::nothing_happens_without_positions();
  shoal::a_batch_of_one_key();
  shoal::weight_gradients_are_row_times_gradient();
  shoal::the_last_position_counts();
  shoal::a_feature_of_two_tables_updates_both();
  shoal::all_finite_sees_every_element();
  shoal::an_update_without_memory_changes_no_row();
  shoal::a_part_may_hold_the_whole_batch();
}
