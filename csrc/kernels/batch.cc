#include "kernels/batch.h"

#include <string>

namespace shoal {

Status check(const Bags& bags, int64_t features, int64_t keys) {
  int64_t before = bags.offset(0);
  if (before != 0) return {Code::input, "offsets must begin at 0; got " + std::to_string(before)};
  for (int64_t i = 1; i <= features * bags.batch; ++i) {
    int64_t here = bags.offset(i);
    if (here < before)
      return {Code::input, "offsets must not decrease, and lengths not be negative; bag " +
                               std::to_string((i - 1) % bags.batch) + " of feature number " +
                               std::to_string((i - 1) / bags.batch) + " goes from " + std::to_string(before) + " to " +
                               std::to_string(here)};
    before = here;
  }
  if (before != keys)
    return {Code::input, "lengths must sum to the number of values; they sum to " + std::to_string(before) +
                             ", and there are " + std::to_string(keys) + " values"};
  return {};
}

}  // namespace shoal
