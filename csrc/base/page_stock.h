// Huge pages that are resident before anyone needs them. The first touch of 2 MiB takes 0.1 ms where the memory is at
// hand, and up to 2 ms in a virtual machine whose host has to find it; a table that grows would wait for that in the
// middle of a step. A thread of its own fills the stock in between.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/memory.h"
#include "base/per_process.h"

namespace shoal {

class PageStock {
 public:
  static PageStock& instance();

  // One huge page: a resident one if there is any, else one that will be when it is touched.
  Status take(Pages* out);
  // Its users' wishes add up to what is kept ready, up to kMost.
  void want(int64_t change) noexcept;
  int64_t ready();

  static constexpr int64_t kMost = 64;  // 128 MiB

 private:
  friend class PerProcess<PageStock>;
  // Room for all it may hold: neither its thread nor a caller that gives pages back could report that there is none.
  PageStock() { ready_.reserve(kMost); }
  int64_t target() const;
  void fill();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Pages> ready_;
  int64_t wanted_ = 0;
  bool has_thread_ = false;
  bool refused_ = false;  // the system had no more: not before the next wish or take
};

// How many pages ahead a holder of `pages` huge pages wants: about 6 % of its memory, and none while one would be more.
inline int64_t pages_ahead(int64_t pages) { return pages < 32 ? 0 : pages / 16; }

}  // namespace shoal
