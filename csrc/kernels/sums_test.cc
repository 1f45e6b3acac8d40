#include "kernels/sums.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "base/memory.h"
#include "kernels/rows_io.h"
#include "kernels/update_fixture_test.h"

namespace shoal {
namespace {

struct Room {
  std::vector<float> sums;
  std::vector<uint64_t> rows, spare, places;
  std::vector<uint32_t> first;

  Room(int64_t positions, int32_t dim)
      // What was there before must not matter.
      : sums(static_cast<size_t>(positions * dim), 7.0f),
        rows(static_cast<size_t>(positions), 7),
        spare(static_cast<size_t>(positions), 7),
        places(static_cast<size_t>(sum_places(positions)), 7),
        first(static_cast<size_t>(positions), 7) {}
  SumRoom get() { return {sums.data(), rows.data(), spare.data(), first.data(), places.data()}; }
};

struct Wanted {
  std::vector<float> sum;
  int64_t first;
};

// The rows of slots with that upper part, one position after the other, in floats.
std::map<uint32_t, Wanted> one_by_one(const UpdatePart& part, const Bags& bags, SlotRange range, int32_t dim) {
  std::map<uint32_t, Wanted> wanted;
  for (int64_t f = 0; f < part.feature_count; ++f) {
    const UpdateFeature& feature = *part.features[f].feature;
    for (int64_t bag = 0; bag < bags.batch; ++bag) {
      const int64_t at = feature.source * bags.batch + bag, from = bags.offset(at), to = bags.offset(at + 1);
      for (int64_t i = from; i < to; ++i) {
        const uint32_t slot = bags.slots_of(feature.slot_list)[i];
        if (slot == kNoSlot || static_cast<uint64_t>(slot) >> range.shift != range.number) continue;
        float scale = part.table->grad_scale;
        if (bags.weights) scale *= bags.weights[i];
        if (feature.pooling == Pooling::mean) scale /= static_cast<float>(to - from);
        const int64_t row = feature.pooling == Pooling::none ? i - part.features[f].begin : bag;
        const float* g = feature.grad + row * feature.stride;
        auto [found, is_new] = wanted.try_emplace(slot, Wanted{{}, i});
        for (int32_t d = 0; d < dim; ++d)
          if (is_new)
            found->second.sum.push_back(scale * g[d]);
          else
            found->second.sum[static_cast<size_t>(d)] += scale * g[d];
      }
    }
  }
  return wanted;
}

void check_sums(int32_t dim, Pooling pooling, bool weighted, int64_t rows, int64_t batch_size, int64_t longest) {
  Table table(dim, Dtype::f32, rows, 0);
  Batch batch(static_cast<uint64_t>(dim) * 31 + 5, batch_size, longest, dim, {pooling, Pooling::sum}, {&table, &table});
  for (size_t i = 0; i < batch.grads[0].size(); i += 3) batch.grads[0][i] = -0.0f;
  Bags bags = batch.bags(weighted);
  bags.count = static_cast<int64_t>(batch.keys.size());
  // The second feature reads its second slot list; nothing reads its first.
  const size_t own = static_cast<size_t>(bags.offset(batch_size));
  std::vector<uint32_t> slots = batch.slots;
  slots.insert(slots.end(), batch.slots.begin(), batch.slots.end());
  std::fill(slots.begin() + static_cast<int64_t>(own), slots.begin() + bags.count, 1u);
  bags.slots = slots.data();
  UpdateFeature features[2] = {batch.feature(0, 0), batch.feature(1, 0)};
  features[1].slot_list = 1;
  const int64_t middle = bags.offset(batch_size), end = bags.offset(2 * batch_size);
  const GradientRow both[2] = {{&features[0], 0, middle}, {&features[1], middle, end}};
  UpdateTable settings;
  settings.rows = &table.rows();
  settings.grad_scale = 0.37f;
  const UpdatePart part{&settings, both, 2, false, nullptr, nullptr};
  for (SlotRange range : {SlotRange{32, 0}, SlotRange{8, 0}, SlotRange{8, 1}, SlotRange{3, 5}}) {
    const std::map<uint32_t, Wanted> wanted = one_by_one(part, bags, range, dim);
    Room room(end, dim);
    const int64_t n = sum_kernel().run(part, bags, range, room.get());
    CHECK(n == static_cast<int64_t>(wanted.size()), n, wanted.size());
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t row = room.rows[static_cast<size_t>(i)];
      CHECK((row & 0xffffffffu) == static_cast<uint64_t>(i));
      const Wanted& one = wanted.at(static_cast<uint32_t>(row >> 32));
      CHECK(room.first[static_cast<size_t>(i)] == one.first);
      CHECK(!std::memcmp(&room.sums[static_cast<size_t>(i * dim)], one.sum.data(), one.sum.size() * sizeof(float)));
    }
  }
}

void sums_have_the_bits_of_one_position_after_the_other() {
  for (const std::string& isa : available_isas()) {
    CHECK(set_isa(isa), isa);
    for (int32_t dim : {1, 3, 16, 17, 32, 48, 64, 80, 96, 128, 200})
      for (Pooling pooling : {Pooling::none, Pooling::sum, Pooling::mean})
        for (bool weighted : {false, true}) check_sums(dim, pooling, weighted, 700, 61, 23);
    check_sums(16, Pooling::sum, false, 30000, 4000, 20);  // places grow
    check_sums(16, Pooling::sum, false, 5, 0, 20);
    check_sums(16, Pooling::sum, true, 5, 9, 0);
  }
  CHECK(set_isa(available_isas().back()));
}

GradientRow row_of(const UpdateFeature& feature, int64_t n) { return {&feature, 0, n}; }

void a_sample_tells_keys_that_repeat() {
  Random random(3);
  const UpdateFeature feature;
  auto repeat = [&](int64_t n, auto&& draw) {
    std::vector<uint32_t> slots;
    for (int64_t i = 0; i < n; ++i) slots.push_back(static_cast<uint32_t>(draw(i)));
    Bags bags;
    bags.count = n;
    bags.slots = slots.data();
    const GradientRow row = row_of(feature, n);
    return keys_repeat(&row, 1, bags);
  };
  for (int64_t n : {512, 5000, 100000}) {
    CHECK(repeat(n, [](int64_t) { return 7; }), n);
    CHECK(repeat(n, [&](int64_t) { return random.below(n / 50); }), n);
    CHECK(!repeat(n, [](int64_t i) { return i; }), n);
    CHECK(!repeat(n, [](int64_t) { return kNoSlot; }), n);
  }
  CHECK(!repeat(511, [](int64_t) { return 7; }));
  CHECK(!repeat(0, [](int64_t) { return 7; }));
}

// Whether a table's gradients are summed or sorted is its own business: the bits are the same.
void a_step_has_the_same_bits_either_way() {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (int threads : {1, 2, 5}) {
      // update() sums these; the kernel gets the same ones as pairs, sorted here.
      Table sorted(24, dtype, 40, 1), summed(24, dtype, 40, 1);
      Batch batch(11, 300, 7, 24, {Pooling::sum}, {&sorted});
      const Bags bags = batch.bags(false);
      const GradientRow in{nullptr, 0, bags.offset(300)};
      UpdateFeature feature = batch.feature(0, 0);
      const GradientRow row{&feature, in.begin, in.end};
      CHECK(keys_repeat(&row, 1, bags));
      UpdateTable settings;
      settings.optimizer = Optimizer::rowwise_adagrad;
      settings.hyper = {0.1f, {1e-6f}};
      settings.rows = &summed.rows();
      ChangedRows changed;
      settings.changed = &changed;
      const UpdateCounts counts = update({settings}, {feature}, bags, threads)[0];
      // Each row that changed is listed once, in whatever order.
      std::vector<uint32_t> slots = changed.take_slots(), named(bags.slots, bags.slots + in.end);
      std::sort(slots.begin(), slots.end());
      std::sort(named.begin(), named.end());
      named.erase(std::unique(named.begin(), named.end()), named.end());
      std::erase(named, kNoSlot);
      CHECK(slots == named && counts.rows == static_cast<int64_t>(slots.size()));
      // Sorted, by the kernel itself.
      std::vector<uint64_t> pairs;
      std::vector<uint32_t> bag_of(static_cast<size_t>(in.end));
      for (int64_t bag = 0; bag < bags.batch; ++bag)
        for (int64_t i = bags.offset(bag); i < bags.offset(bag + 1); ++i) {
          bag_of[static_cast<size_t>(i)] = static_cast<uint32_t>(bag);
          if (bags.slots[i] != kNoSlot) pairs.push_back(uint64_t{bags.slots[i]} << 32 | static_cast<uint64_t>(i));
        }
      std::stable_sort(pairs.begin(), pairs.end(), [](uint64_t a, uint64_t b) { return a >> 32 < b >> 32; });
      settings.rows = &sorted.rows();
      const UpdatePart part{&settings, &row, 1, false, bag_of.data(), nullptr};
      UpdateRows rows{};
      rows.sorted = pairs.data();
      rows.count = static_cast<int64_t>(pairs.size());
      std::vector<float> scratch(static_cast<size_t>(update_scratch_floats(24)));
      const UpdateCounts again = update_kernel().run(part, bags, rows, scratch.data());
      CHECK(again.rows == counts.rows);
      CHECK(sorted.snapshot() == summed.snapshot(), threads);
    }
}

// Every thread has room for the sums of a part: for its rows, however many positions name them.
void room_goes_by_the_rows_of_a_part() {
  constexpr int64_t kPositions = 200000, kBags = 1000;
  Table table(16, Dtype::f32, 1000, 0);
  std::vector<int64_t> keys(kPositions), offsets;
  for (int64_t bag = 0; bag <= kBags; ++bag) offsets.push_back(kPositions / kBags * bag);
  std::vector<uint32_t> slots;
  for (int64_t i = 0; i < kPositions; ++i) slots.push_back(table.slots[static_cast<size_t>(i * 7 % 1000)]);
  const std::vector<float> grad(16 * kBags, 0.5f);
  Bags bags;
  bags.keys = keys.data();
  bags.offsets = offsets.data();
  bags.batch = kBags;
  bags.count = kPositions;
  bags.slots = slots.data();
  UpdateTable settings;
  settings.rows = &table.rows();
  ChangedRows changed;
  settings.changed = &changed;
  const size_t before = Buffers::instance().idle_bytes();
  const UpdateCounts counts = update({settings}, {{0, 0, Pooling::sum, grad.data(), 16}}, bags, 16)[0];
  CHECK(counts.rows == 1000 && changed.take_slots().size() == 1000);
  // Room for the rows of all positions would be 28 MiB a thread.
  const size_t kept = Buffers::instance().idle_bytes() - before;
  CHECK(kept <= size_t{16} << 20, kept);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::room_goes_by_the_rows_of_a_part();
  shoal::sums_have_the_bits_of_one_position_after_the_other();
  shoal::a_sample_tells_keys_that_repeat();
  shoal::a_step_has_the_same_bits_either_way();
}
