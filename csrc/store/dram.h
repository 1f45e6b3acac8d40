// Rows in host memory, in slabs of at least 2 MiB reached through a table of pointers: growing never moves a row.
//
// Thread safety: none of its own; the table's lock covers it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/rows.h"
#include "base/status.h"

namespace shoal {

class DramStore {
 public:
  // first_facts: the first values of the facts other than the score; its size is that of these facts, a multiple of 4.
  DramStore(int32_t dim, Dtype dtype, int32_t state_floats, std::string first_facts = {});
  ~DramStore();
  DramStore(const DramStore&) = delete;
  DramStore& operator=(const DramStore&) = delete;

  const Rows& rows() const { return rows_; }
  int64_t live() const { return live_; }
  int64_t slabs() const { return static_cast<int64_t>(pages_.size()); }
  // The memory that the rows take now, and after `more` of them.
  int64_t bytes() const { return bytes_of(slabs(), fresh_); }
  int64_t bytes_after(int64_t more) const;

  // Makes sure that `more` slots can be taken. On failure, slots for which there was memory are kept.
  Status reserve(int64_t more);
  // Takes the n lowest free slots. REQUIRES: reserve(n) succeeded.
  void take(uint32_t* slots, int64_t n);
  void give(const uint32_t* slots, int64_t n);

  // From here on keeps the key of every row, by slot: 8 bytes more a row. A key is unknown until name() gives it. On
  // failure no keys are kept.
  Status keep_keys();
  void forget_keys();
  bool keeps_keys() const { return keeps_keys_; }
  // Gives the keys of slots, if keys are kept.
  void name(const uint32_t* slots, const int64_t* keys, int64_t n);

  // True if moving rows to the front would free a slab worth the work.
  bool sparse() const;
  // First slot of the slabs that a full compaction would empty.
  uint32_t compact_from() const;
  void move(uint32_t from, uint32_t to);
  // Unmaps empty slabs at the end.
  void release_tail();

 private:
  using Keys = std::unique_ptr<int64_t[]>;  // of a slab

  int64_t bytes_of(int64_t slabs, int64_t fresh) const;
  int64_t key_bytes() const { return keeps_keys_ ? static_cast<int64_t>(sizeof(int64_t)) : 0; }
  Keys new_keys() const { return std::make_unique<int64_t[]>(rows_.rows_per_slab); }
  void show_slabs();
  bool grows_by_huge_page() const;
  bool append(Pages pages);
  void tell_stock(int64_t ahead);
  int64_t free_slots() const { return slabs() * rows_.rows_per_slab - live_; }

  const std::string first_facts_;
  Rows rows_;
  size_t slab_bytes_;
  std::vector<Pages> pages_;
  std::vector<char*> slabs_;
  bool keeps_keys_ = false;
  std::vector<Keys> keys_;  // by slab, if they are kept
  std::vector<int64_t*> keys_of_;
  std::vector<std::vector<uint64_t>> free_;  // one bit a row, by slab
  std::vector<uint32_t> free_count_;
  int64_t lowest_free_ = 0;  // no slab before it has a free slot
  int64_t fresh_ = 0;        // slots that were in use at least once, counted from the first slab
  int64_t live_ = 0;
  int64_t ahead_ = 0;  // pages that the stock keeps ready for this store
};

}  // namespace shoal
