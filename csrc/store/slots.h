// Which slot on disk the row of a key has: an index in parts, by the key's hash, so that two threads can work on it.
//
// Thread safety: const methods may run beside each other; the others need it to themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "index/index.h"

namespace shoal {

class SlotIndex {
 public:
  SlotIndex() = default;
  ~SlotIndex();
  SlotIndex(const SlotIndex&) = delete;
  SlotIndex& operator=(const SlotIndex&) = delete;

  int64_t size() const;
  // With pages that wait for the next growth.
  int64_t bytes() const;

  // kNoSlot where a key has none.
  void find(const int64_t* keys, uint32_t* slots, int64_t n) const;

  // Gives key i the slot first + i, and tells in had[i] which one it had. Where `from` is not null only keys that have
  // the slot from[i] get theirs. had[i] is first + i itself for a key that did not get it: where from[i] was not its slot,
  // or, with an error, where there is no memory to put a new key in. REQUIRES: the keys differ from each other.
  Status put(const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had);

  // The slot the key had, or kNoSlot.
  uint32_t erase(int64_t key);
  std::vector<int64_t> keys() const;

 private:
  // More would grow by doubling up to a larger number of rows, and take more than 24 bytes for each of them.
  static constexpr int kParts = 2;
  static int part_of(int64_t key);
  // Calls work(numbers, keys, count) for the keys of one part, a few at a time.
  template <typename Work>
  static void for_part(int part, const int64_t* keys, int64_t n, const Work& work);
  Status put_part(int part, const int64_t* keys, int64_t n, uint32_t first, const uint32_t* from, uint32_t* had);

  // Has the pages of a growth that is near made resident, so that the write that begins it need not wait.
  void prepare_growth();

  Index parts_[kParts];
  int64_t pages_ahead_ = 0;
};

}  // namespace shoal
