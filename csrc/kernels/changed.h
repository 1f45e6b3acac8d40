// The rows that changed since the list was last taken, each at least once: by key if the key is known, else by slot. A
// row's flag kChanged says that it is listed already.
//
// Thread safety: none of its own; the table's lock covers it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

class ChangedRows {
 public:
  // Throws std::bad_alloc, and then has none of them.
  void add(const int64_t* keys, int64_t n) { keys_.insert(keys_.end(), keys, keys + n); }

  // Makes room for n more slots, so that listing them cannot fail after rows have changed. Throws std::bad_alloc.
  void expect(int64_t n) {
    const size_t wanted = slots_.size() + static_cast<size_t>(n);
    if (wanted > slots_.capacity()) slots_.reserve(std::max(wanted, 2 * slots_.size()));
  }
  // REQUIRES: so many are expected.
  void add_slots(const uint32_t* slots, int64_t n) noexcept { slots_.insert(slots_.end(), slots, slots + n); }

  std::vector<int64_t> take_keys() { return std::exchange(keys_, {}); }
  // Throws std::bad_alloc, and then has them still.
  std::vector<uint32_t> take_slots() {
    std::vector<uint32_t> taken = slots_;
    if (slots_.capacity() > kMostRoomKept) slots_ = {};
    slots_.clear();
    return taken;
  }

 private:
  // Fresh memory costs a step more than listing does: what a usual seal finds room in is not given back.
  static constexpr size_t kMostRoomKept = size_t{1} << 20;

  std::vector<int64_t> keys_;
  std::vector<uint32_t> slots_;
};

}  // namespace shoal
