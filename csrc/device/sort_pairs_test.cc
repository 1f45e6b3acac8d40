#include "device/sort_pairs.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

void by_low_bits(const int32_t* keys, int32_t* sorted_keys, const void* numbers, void* sorted_numbers, int64_t n,
                 bool descending, int64_t begin_bit, int64_t end_bit) {
  CHECK(!descending && begin_bit == 0);
  std::vector<int64_t> places(n);
  std::iota(places.begin(), places.end(), 0);
  const uint32_t low = end_bit == 32 ? ~uint32_t{0} : (uint32_t{1} << end_bit) - 1;
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return (uint32_t(keys[a]) & low) < (uint32_t(keys[b]) & low); });
  for (int64_t i = 0; i < n; i++) {
    sorted_keys[i] = keys[places[i]];
    static_cast<int32_t*>(sorted_numbers)[i] = static_cast<const int32_t*>(numbers)[places[i]];
  }
}

void out_of_memory(const int32_t*, int32_t*, const void*, void*, int64_t, bool, int64_t, int64_t) {
  throw std::runtime_error("CUDA out of memory. Tried to allocate 2.00 GiB.");
}

void out_of_order(const int32_t*, int32_t*, const void*, void*, int64_t, bool, int64_t, int64_t) {
  throw std::runtime_error("CUDA error: invalid argument");
}

void sorts_by_as_many_bits_as_are_asked_for() {
  const std::vector<int32_t> keys = {5, -1, 3, 5, 0}, numbers = {0, 1, 2, 3, 4};
  std::vector<int32_t> sorted(5), order(5);
  CHECK(sort_pairs(by_low_bits, keys.data(), sorted.data(), numbers.data(), order.data(), 5, 3).ok());
  CHECK((sorted == std::vector<int32_t>{0, 3, 5, 5, -1}));
  CHECK((order == std::vector<int32_t>{4, 2, 0, 3, 1}));
}

void what_torch_throws_is_an_error_of_its_kind() {
  Status status = sort_pairs(out_of_memory, nullptr, nullptr, nullptr, nullptr, 0, 1);
  CHECK(status.code() == Code::memory);
  CHECK(status.message().find("2.00 GiB") != std::string::npos);
  status = sort_pairs(out_of_order, nullptr, nullptr, nullptr, nullptr, 0, 1);
  CHECK(status.code() == Code::device);
  CHECK(status.message().find("invalid argument") != std::string::npos);
}

void there_is_none_without_torch() { CHECK(find_sort_pairs() == nullptr); }

}  // namespace
}  // namespace shoal

int main() {
  shoal::sorts_by_as_many_bits_as_are_asked_for();
  shoal::what_torch_throws_is_an_error_of_its_kind();
  shoal::there_is_none_without_torch();
}
