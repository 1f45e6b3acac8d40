#include "lookup/batch_lookup.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace shoal {

LookupBatch::LookupBatch(Numbers keys, Numbers offsets, const float* weights, int64_t features, int64_t slot_lists)
    : features_(features), slot_count_(static_cast<size_t>(slot_lists * keys.count)), slots_(slot_count_) {
  bags_.count = keys.count;
  bags_.batch = (offsets.count - 1) / std::max<int64_t>(features, 1);
  bags_.slots = slots_.get();
  point_to(keys, offsets, weights);
  bounds_ = bounds_now();
}

Status LookupBatch::bind_again(Numbers keys, Numbers offsets, const float* weights) {
  if (keys.count == bags_.count && offsets.count - 1 == features_ * bags_.batch) {
    point_to(keys, offsets, weights);
    Status status = check();
    if (!status.ok() || bounds_now() == bounds_) return status;
  }
  return {Code::input, "the backward wants the values and offsets of its forward"};
}

// Bytes of keys and of offsets.
static std::pair<size_t, size_t> sizes_of(const Bags& bags, int64_t features) {
  const size_t offsets = static_cast<size_t>(features * bags.batch + 1);
  return {static_cast<size_t>(bags.count) * (bags.narrow_keys ? 4 : 8), offsets * (bags.narrow_offsets ? 4 : 8)};
}

void LookupBatch::begin_ahead() {
  auto [keys, offsets] = sizes_of(bags_, features_);
  kept_ = Kept<char>(keys + offsets);
  std::memcpy(kept_.get() + keys, bags_.offsets, offsets);
  std::fill_n(slots_.get(), slot_count_, kNoSlot);
}

bool LookupBatch::has_bags_of(Numbers keys, Numbers offsets) const {
  if (keys.count != bags_.count || keys.narrow != bags_.narrow_keys || offsets.narrow != bags_.narrow_offsets ||
      offsets.count != features_ * bags_.batch + 1)
    return false;
  auto [of_keys, of_offsets] = sizes_of(bags_, features_);
  return !std::memcmp(kept_.get() + of_keys, offsets.data, of_offsets);
}

void LookupBatch::point_to(Numbers keys, Numbers offsets, const float* weights) {
  bags_.keys = keys.data;
  bags_.narrow_keys = keys.narrow;
  bags_.offsets = offsets.data;
  bags_.narrow_offsets = offsets.narrow;
  bags_.weights = weights;
}

std::vector<int64_t> LookupBatch::bounds_now() const {
  std::vector<int64_t> bounds;
  for (int64_t f = 0; f <= features_; ++f) bounds.push_back(bags_.batch ? bags_.offset(f * bags_.batch) : 0);
  return bounds;
}

void LookupBatch::finish(int threads) {
  pool_rest(parts_, rest_, bags_, slots_.get(), out_dtype_, threads);
  rest_.clear();
  for (const Count& count : counts_) {
    count.tally->lookups.fetch_add(count.lookups, std::memory_order_relaxed);
    count.tally->hits.fetch_add(count.hits, std::memory_order_relaxed);
  }
}

std::vector<int64_t> BatchLookup::run(LookupBatch& batch, char* out, int64_t width, Dtype dtype, bool training,
                                      bool known, int threads) const {
  const int64_t bytes = dtype == Dtype::f32 ? 4 : 2;
  batch.parts_.clear();
  batch.out_dtype_ = dtype;
  char* each = out;
  for (const LookupFeature& one : features_) {
    LookupPart part{one.index, one.pool, (one.trains && training) || one.fetches};
    const int64_t dim = one.pool.rows->dim;
    const KeyRange keys = batch.range(one.pool.source, 0);
    part.feature.out = width < 0 ? each : out + one.column * bytes;
    part.feature.stride = width < 0 ? dim : width;
    each += (keys.end - keys.begin) * dim * bytes;
    batch.parts_.push_back(part);
  }
  Found found = lookup(batch.parts_, batch.bags_, batch.slots(), known ? batch.kept_.get() : nullptr, dtype, threads);
  batch.are_kept_ = false;
  batch.counts_.clear();
  for (size_t f = 0; f < features_.size(); ++f) {
    const KeyRange range = batch.range(features_[f].pool.source, 0);
    const int64_t keys = range.end - range.begin;
    batch.counts_.push_back({features_[f].tally, keys, keys - found.missing[f]});
  }
  batch.rest_ = std::move(found.rest);
  if (!batch.rest_.empty()) return found.missing;
  batch.finish(threads);
  return {};
}

MissingKeys BatchLookup::find(LookupBatch& batch, RwLock& indexes, const std::vector<std::vector<size_t>>& tables,
                              int threads) const {
  batch.are_kept_ = true;
  std::vector<LookupPart> parts;
  for (const LookupFeature& one : features_) parts.push_back({one.index, one.pool, one.trains || one.fetches});
  const std::vector<Lacking> found =
      find_ahead(parts, batch.bags_, batch.bounds_, batch.kept_.get(), batch.slots(), indexes, threads);
  std::vector<std::vector<const Lacking*>> lacking(tables.size());
  for (size_t t = 0; t < tables.size(); ++t)
    for (size_t feature : tables[t]) lacking[t].push_back(&found.at(feature));
  return MissingKeys(lacking, batch.keys(), threads);
}

}  // namespace shoal
