#include "store/dram.h"

#include <algorithm>
#include <utility>

#include "base/page_stock.h"

namespace shoal {

// A table below this many slabs stays on small pages, so that its resident set follows its rows.
static constexpr int64_t kHugeFromSlab = 9;
static constexpr int64_t kMinRowsPerSlab = 16;

static uint32_t bits_for(uint32_t n) { return n <= 1 ? 0 : 32 - static_cast<uint32_t>(__builtin_clz(n - 1)); }

DramStore::DramStore(int32_t dim, Dtype dtype, int32_t state_floats, std::string first_facts)
    : first_facts_(std::move(first_facts)) {
  rows_.dim = dim;
  rows_.dtype = dtype;
  rows_.state_floats = state_floats;
  rows_.weight_bytes = static_cast<int64_t>(dim) * (dtype == Dtype::f32 ? 4 : 2);
  rows_.fact_bytes = static_cast<int32_t>(first_facts_.size());
  rows_.first_facts = first_facts_.data();
  rows_.tail_bytes = static_cast<int64_t>(state_floats) * 4 + 8 + 4 + rows_.fact_bytes;
  int64_t row = rows_.weight_bytes + rows_.tail_bytes;
  int64_t pages = (row * kMinRowsPerSlab + 64 + static_cast<int64_t>(kHugePage) - 1) / static_cast<int64_t>(kHugePage);
  slab_bytes_ = static_cast<size_t>(pages) * kHugePage;
  rows_.rows_per_slab = static_cast<uint32_t>((static_cast<int64_t>(slab_bytes_) - 64) / row);
  rows_.slot_bits = bits_for(rows_.rows_per_slab);
  rows_.tails_at = (rows_.rows_per_slab * rows_.weight_bytes + 63) / 64 * 64;
}

DramStore::~DramStore() { tell_stock(0); }

bool DramStore::grows_by_huge_page() const { return slab_bytes_ == kHugePage && slabs() >= kHugeFromSlab; }

void DramStore::tell_stock(int64_t ahead) {
  if (ahead != ahead_) PageStock::instance().want(ahead - ahead_);
  ahead_ = ahead;
}

int64_t DramStore::bytes_of(int64_t slabs, int64_t fresh) const {
  int64_t small = std::min(slabs, kHugeFromSlab) * static_cast<int64_t>(slab_bytes_);
  if (slabs <= kHugeFromSlab) small = std::min(small, fresh * (rows_.weight_bytes + rows_.tail_bytes));
  const int64_t large = std::max<int64_t>(slabs - kHugeFromSlab, 0) * static_cast<int64_t>(slab_bytes_);
  return small + large + fresh * key_bytes();
}

int64_t DramStore::bytes_after(int64_t more) const {
  int64_t rows = live_ + more, per_slab = rows_.rows_per_slab;
  return bytes_of(std::max(slabs(), (rows + per_slab - 1) / per_slab), std::max(fresh_, rows));
}

Status DramStore::reserve(int64_t more) {
  const int64_t wanted = live_ + more;
  while (free_slots() < more) {
    if (static_cast<uint64_t>(slabs() + 1) << rows_.slot_bits > kNoSlot)
      return {Code::capacity, "a table holds at most 2^32 - 1 slots"};
    Pages pages;
    Status status = grows_by_huge_page() ? PageStock::instance().take(&pages) : Pages::map(slab_bytes_, &pages);
    if (!status.ok()) return status;
    if (slabs() == kHugeFromSlab)
      for (Pages& small : pages_) small.collapse();
    // From here on a slab is less than an eighth of the table; before, one that this call fills wastes nothing either.
    if (slabs() >= kHugeFromSlab || (slabs() + 1) * rows_.rows_per_slab <= wanted) pages.advise_huge();
    if (!append(std::move(pages))) return out_of_memory();
    if (grows_by_huge_page()) tell_stock(pages_ahead(slabs()));
  }
  return {};
}

// All allocations come before the first change; otherwise the lists could differ in length.
bool DramStore::append(Pages pages) {
  std::vector<uint64_t> bits;
  Keys keys;
  try {
    if (keeps_keys_) keys = new_keys();
    bits.assign((rows_.rows_per_slab + 63) / 64, ~uint64_t{0});
    auto make_room = [](auto& list) {
      if (list.size() == list.capacity()) list.reserve(std::max<size_t>(8, 2 * list.size()));
    };
    make_room(pages_);
    make_room(free_);
    make_room(free_count_);
    make_room(keys_);
    make_room(keys_of_);
    make_room(slabs_);
  } catch (const std::bad_alloc&) {
    show_slabs();  // they may lie elsewhere now
    return false;
  }
  if (uint32_t rest = rows_.rows_per_slab % 64) bits.back() = (uint64_t{1} << rest) - 1;
  if (keeps_keys_) {
    keys_of_.push_back(keys.get());
    keys_.push_back(std::move(keys));
  }
  slabs_.push_back(pages.data());
  pages_.push_back(std::move(pages));
  free_.push_back(std::move(bits));
  free_count_.push_back(rows_.rows_per_slab);
  show_slabs();
  return true;
}

void DramStore::show_slabs() {
  rows_.slabs = slabs_.data();
  rows_.keys = keeps_keys_ ? keys_of_.data() : nullptr;
  rows_.slab_count = static_cast<uint32_t>(slabs());
}

Status DramStore::keep_keys() {
  if (keeps_keys_) return {};
  try {
    std::vector<Keys> keys;
    std::vector<int64_t*> keys_of;
    for (int64_t slab = 0; slab < slabs(); ++slab) {
      keys.push_back(new_keys());
      keys_of.push_back(keys.back().get());
    }
    keys_ = std::move(keys);
    keys_of_ = std::move(keys_of);
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
  keeps_keys_ = true;
  show_slabs();
  return {};
}

void DramStore::forget_keys() {
  keeps_keys_ = false;
  keys_ = std::vector<Keys>();
  keys_of_ = std::vector<int64_t*>();
  show_slabs();
}

void DramStore::name(const uint32_t* slots, const int64_t* keys, int64_t n) {
  if (!keeps_keys_) return;
  for (int64_t i = 0; i < n; ++i) rows_.key(slots[i]) = keys[i];
}

void DramStore::take(uint32_t* slots, int64_t n) {
  live_ += n;
  while (n > 0) {
    while (free_count_[lowest_free_] == 0) ++lowest_free_;
    std::vector<uint64_t>& words = free_[lowest_free_];
    for (size_t w = 0; w < words.size() && n > 0; ++w)
      while (words[w] && n > 0) {
        uint32_t row = static_cast<uint32_t>(64 * w) + static_cast<uint32_t>(__builtin_ctzll(words[w]));
        words[w] &= words[w] - 1;
        --free_count_[lowest_free_];
        fresh_ = std::max(fresh_, lowest_free_ * rows_.rows_per_slab + row + 1);
        *slots++ = static_cast<uint32_t>(lowest_free_) << rows_.slot_bits | row;
        --n;
      }
  }
}

void DramStore::give(const uint32_t* slots, int64_t n) {
  live_ -= n;
  for (int64_t i = 0; i < n; ++i) {
    int64_t slab = slots[i] >> rows_.slot_bits;
    uint32_t row = slots[i] & ((1u << rows_.slot_bits) - 1);
    free_[slab][row / 64] |= uint64_t{1} << (row % 64);
    ++free_count_[slab];
    lowest_free_ = std::min(lowest_free_, slab);
  }
}

uint32_t DramStore::compact_from() const {
  int64_t needed = (live_ + rows_.rows_per_slab - 1) / rows_.rows_per_slab;
  return static_cast<uint32_t>(std::min(needed, slabs()) << rows_.slot_bits);
}

bool DramStore::sparse() const {
  int64_t needed = (live_ + rows_.rows_per_slab - 1) / rows_.rows_per_slab;
  return slabs() > needed + needed / 4 + (needed == 0 ? 0 : 1);
}

void DramStore::move(uint32_t from, uint32_t to) {
  std::memcpy(rows_.weights(to), rows_.weights(from), static_cast<size_t>(rows_.weight_bytes));
  std::memcpy(rows_.tail(to), rows_.tail(from), static_cast<size_t>(rows_.tail_bytes));
  if (keeps_keys_) rows_.key(to) = rows_.key(from);
}

void DramStore::release_tail() {
  while (!pages_.empty() && free_count_.back() == rows_.rows_per_slab) {
    pages_.pop_back();
    slabs_.pop_back();
    free_.pop_back();
    free_count_.pop_back();
    if (keeps_keys_) {
      keys_.pop_back();
      keys_of_.pop_back();
    }
  }
  show_slabs();
  fresh_ = std::min(fresh_, slabs() * rows_.rows_per_slab);
  lowest_free_ = std::min(lowest_free_, slabs());
  tell_stock(grows_by_huge_page() ? pages_ahead(slabs()) : 0);
}

}  // namespace shoal
