// The keys whose rows changed since they were taken last, each at least once. A row's flag kChanged says that its key is
// listed already.
//
// Thread safety: none of its own; the table's lock covers it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

class ChangedKeys {
 public:
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  // Whether keys are missing, as there was no memory to list them.
  bool is_incomplete() const { return is_incomplete_; }
  // Whether rows were flagged changed whose keys nobody knew: they are found by their flags.
  bool has_unlisted() const { return has_unlisted_; }
  void leave_unlisted() { has_unlisted_ = true; }

  // Throws std::bad_alloc, and then has none of them.
  void add(const int64_t* keys, int64_t n) { keys_.insert(keys_.end(), keys, keys + n); }
  // The same where rows changed already, and nothing may fail: it is incomplete if there is no memory.
  void add_late(const int64_t* keys, int64_t n) noexcept {
    try {
      add(keys, n);
    } catch (...) {
      is_incomplete_ = true;
    }
  }

  // All of them; it is empty, and complete, afterwards.
  std::vector<int64_t> take() {
    is_incomplete_ = has_unlisted_ = false;
    return std::exchange(keys_, {});
  }

 private:
  std::vector<int64_t> keys_;
  bool is_incomplete_ = false;
  bool has_unlisted_ = false;
};

}  // namespace shoal
