// Index: key -> slot for one table. Any int64 is a key.
//
// Thread safety: const methods may run concurrently; the others need exclusive use of the table. Growth: by a fifth of
// its buckets at a time (small ones double), in place, a few buckets for each inserted key. So no call takes longer
// than its own work, and there are never two copies.
#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "base/rows.h"
#include "base/status.h"
#include "index/bucket.h"

namespace shoal {

class Index {
 public:
  Index() = default;
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  const IndexView& view() const { return view_; }
  int64_t size() const { return size_; }
  // The memory that the index takes now, and at most after `more` inserts.
  int64_t bytes() const { return bytes_of(extent_); }
  int64_t bytes_after(int64_t more) const;

  uint32_t find(int64_t key) const;

  // Makes room for `more` keys. On failure nothing is lost and no key has moved out of reach.
  Status reserve(int64_t more);
  // On failure none of the keys is in. REQUIRES: reserve(n) succeeded, and the keys are absent and differ from each other.
  Status insert(const int64_t* keys, const uint32_t* slots, int64_t n);
  // The slot the key had, or kNoSlot.
  uint32_t erase(int64_t key);

  // Gives a key that is in the index another slot.
  void reassign(int64_t key, uint32_t slot);

  // Gives memory back after many erases; `budget` limits how many buckets are looked at. Returns true when nothing is
  // left to do. Does less if it cannot allocate the memory that it needs.
  bool shrink(int64_t budget);

  // Entries are in buckets [0, extent()); a scan may visit them in any ranges.
  uint64_t extent() const { return extent_; }
  // Calls visit(key, slot&) for every entry of buckets [from, to).
  template <typename Visit>
  void scan(uint64_t from, uint64_t to, const Visit& visit) const {
    for (uint64_t at = from; at < to && at < extent_; ++at) {
      Bucket& bucket = *view_.at(at);
      for (uint32_t used = bucket.used; used; used &= used - 1) {
        int i = __builtin_ctz(used);
        visit(bucket.keys[i], bucket.slots[i]);
      }
    }
  }

 private:
  static int64_t bytes_of(uint64_t buckets);
  bool settled() const { return view_.low == view_.high; }
  uint32_t* locate(int64_t key) const;
  Status map_chunks(uint64_t buckets);
  Status extend(uint64_t buckets);
  uint64_t put(uint64_t at, int64_t key, uint32_t slot);
  Status put_into_new(uint64_t home, int64_t key, uint32_t slot);
  bool place(uint64_t home, int64_t key, uint32_t slot, Status* status);
  void take_out(uint64_t home, uint64_t at, int which);
  void uncount(uint64_t home, uint64_t at);
  void empty(uint64_t from, uint64_t to);
  bool collect(uint64_t scale, uint64_t from, uint64_t to);
  void resettle();
  Status begin_growth(uint64_t buckets);
  Status grow(uint64_t count);
  void release_tail();

  std::vector<Pages> pages_;
  std::vector<Bucket*> chunks_;
  IndexView view_;
  uint64_t extent_ = 0;  // every bucket at or beyond it is empty
  int64_t size_ = 0;
  struct Moving {
    int64_t key;
    uint64_t hash;
    uint32_t slot;
  };
  std::vector<Moving> moving_;
};

}  // namespace shoal
