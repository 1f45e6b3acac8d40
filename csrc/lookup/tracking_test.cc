#include "lookup/tracking.h"

#include <vector>

#include "base/check.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

void every_row_has_its_key_and_is_as_if_it_had_not_changed() {
  for (int64_t n : {0, 1, 15, 16, 17, 100000})
    for (int threads : {1, 3}) {
      DramStore store(4, Dtype::f32, 1);
      Index index;
      std::vector<uint32_t> slots(static_cast<size_t>(n));
      std::vector<int64_t> keys(slots.size());
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 7919 - 5;
      CHECK(store.reserve(n + 1).ok() && index.reserve(n).ok());
      store.take(slots.data(), n);
      CHECK(index.insert(keys.data(), slots.data(), n).ok());
      const float state = 0;
      birth(store.rows(), {}, &state, {0.0, 9}, keys.data(), slots.data(), n, 1);
      CHECK(store.keep_keys().ok());
      begin_tracking(index, store.rows(), threads);
      for (size_t i = 0; i < keys.size(); ++i) {
        CHECK(store.rows().key(slots[i]) == keys[i], i);
        CHECK(store.rows().flags(store.rows().tail(slots[i])) == stamped(kDirty, 9), i);
      }
    }
}

}  // namespace
}  // namespace shoal

int main() { shoal::every_row_has_its_key_and_is_as_if_it_had_not_changed(); }
