// What tests of the update share: tables, batches, and the same step by a loop in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/update.h"
#include "store/dram.h"

namespace shoal {

// Rows numbered 0 to n - 1, key = number, whose first weights follow from the key. State begins at 0.1.
struct Table {
  DramStore store;
  std::vector<uint32_t> slots;
  std::vector<int64_t> keys;

  Table(int32_t dim, Dtype dtype, int64_t n, int32_t state_floats) : store(dim, dtype, state_floats) {
    slots.resize(static_cast<size_t>(n));
    CHECK(store.reserve(n).ok());
    store.take(slots.data(), n);
    for (int64_t i = 0; i < n; ++i) keys.push_back(i);
    std::vector<float> state(static_cast<size_t>(state_floats), 0.1f);
    birth(rows(), {InitKind::uniform, -1.0f, 2.0f, 5}, state.data(), {}, keys.data(), slots.data(), n, 1);
    for (uint32_t slot : slots) rows().flags(rows().tail(slot)) = 0;
  }
  const Rows& rows() const { return store.rows(); }
  uint32_t flags(int64_t row) const { return rows().flags(rows().tail(slots[static_cast<size_t>(row)])); }
  float* weights(int64_t row) const {
    return reinterpret_cast<float*>(rows().weights(slots[static_cast<size_t>(row)]));
  }
  // Every byte of every row.
  std::string snapshot() const {
    std::string bytes;
    for (uint32_t slot : slots) {
      bytes.append(rows().weights(slot), static_cast<size_t>(rows().weight_bytes));
      bytes.append(rows().tail(slot), static_cast<size_t>(rows().tail_bytes));
    }
    return bytes;
  }
};

// Bags of keys over several features. Feature f reads rows [0, rows_of[f]) and some keys that have no row.
struct Batch {
  int64_t size;
  std::vector<int64_t> keys, offsets = {0};
  std::vector<uint32_t> slots;
  std::vector<float> weights;
  std::vector<std::vector<float>> grads;  // by feature, [bags or keys, stride]
  std::vector<Pooling> poolings;
  int32_t stride;

  Batch(uint64_t seed, int64_t batch, int64_t longest, int32_t dim, const std::vector<Pooling>& pooling_of,
        const std::vector<const Table*>& table_of)
      : size(batch), poolings(pooling_of), stride(dim + 2) {
    Random random(seed);
    for (size_t f = 0; f < poolings.size(); ++f) {
      int64_t rows = static_cast<int64_t>(table_of[f]->slots.size()), first = static_cast<int64_t>(keys.size());
      for (int64_t bag = 0; bag < size; ++bag) {
        for (int64_t i = random.below(longest + 1); i > 0; --i) {
          // Half of the keys are among ten: long runs of duplicates.
          int64_t row = random.below(2) ? random.below(10) : random.below(rows);
          bool missing = random.below(20) == 0;
          keys.push_back(row % rows);
          slots.push_back(missing ? kNoSlot : table_of[f]->slots[static_cast<size_t>(row % rows)]);
          weights.push_back(random.unit() * 2);
        }
        offsets.push_back(static_cast<int64_t>(keys.size()));
      }
      int64_t outputs = poolings[f] == Pooling::none ? static_cast<int64_t>(keys.size()) - first : size;
      grads.emplace_back();
      for (int64_t i = 0; i < outputs * stride; ++i) grads.back().push_back(random.unit());
    }
  }
  Bags bags(bool weighted) const {
    Bags bags;
    bags.keys = keys.data();
    bags.offsets = offsets.data();
    bags.batch = size;
    bags.slots = slots.data();
    bags.weights = weighted ? weights.data() : nullptr;
    return bags;
  }
  UpdateFeature feature(size_t f, int64_t table) const {
    return {table, static_cast<int64_t>(f), poolings[f], grads[f].data(), stride};
  }
};

// The same step in double precision, one position after the other, for SGD.
struct Naive {
  std::map<uint32_t, std::vector<double>> gradient;
  std::map<uint32_t, int64_t> count;

  void add(const Batch& batch, size_t f, int32_t dim, bool weighted, double grad_scale, Reduce how) {
    int64_t base = batch.offsets[f * static_cast<size_t>(batch.size)];
    for (int64_t bag = 0; bag < batch.size; ++bag) {
      size_t o = f * static_cast<size_t>(batch.size) + static_cast<size_t>(bag);
      int64_t from = batch.offsets[o], to = batch.offsets[o + 1];
      for (int64_t i = from; i < to; ++i) {
        uint32_t slot = batch.slots[static_cast<size_t>(i)];
        if (slot == kNoSlot) continue;
        int64_t at = batch.poolings[f] == Pooling::none ? i - base : bag;
        double scale = grad_scale * (weighted ? batch.weights[static_cast<size_t>(i)] : 1.0f);
        if (batch.poolings[f] == Pooling::mean) scale /= static_cast<double>(to - from);
        const float* g = batch.grads[f].data() + at * batch.stride;
        if (how != Reduce::sum && std::all_of(g, g + dim, [&](float x) { return scale * x == 0.0; })) continue;
        std::vector<double>& sum = gradient[slot];
        bool is_first = count[slot]++ == 0;
        if (is_first || how == Reduce::last) sum.assign(static_cast<size_t>(dim), 0.0);
        if (!is_first && how == Reduce::first) continue;
        for (int32_t j = 0; j < dim; ++j) sum[static_cast<size_t>(j)] += scale * g[j];
      }
    }
  }
  static double norm(const std::vector<double>& x) {
    double squares = 0;
    for (double v : x) squares += v * v;
    return std::sqrt(squares);
  }
  std::vector<double> step(const UpdateTable& table, uint32_t slot, const float* row) {
    std::vector<double> g = gradient.at(slot), w(row, row + table.rows->dim);
    for (double& x : g) {
      if (table.reduce == Reduce::mean) x /= static_cast<double>(count.at(slot));
      if (table.clip_value > 0) x = std::clamp<double>(x, -table.clip_value, table.clip_value);
    }
    double length = norm(g);
    for (size_t i = 0; i < w.size(); ++i) {
      if (table.clip_norm > 0 && length > table.clip_norm) g[i] *= table.clip_norm / length;
      g[i] += table.weight_decay * w[i];
      w[i] = w[i] * table.shrink - table.hyper.lr * g[i];
    }
    length = norm(w);
    if (table.max_norm > 0 && length > table.max_norm)
      for (double& x : w) x *= table.max_norm / length;
    return w;
  }
};

}  // namespace shoal
