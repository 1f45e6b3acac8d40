#include "device/sort_pairs.h"

#include <dlfcn.h>

#include <exception>
#include <string>

namespace shoal {

SortPairs find_sort_pairs() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  // at::cuda::cub::detail::radix_sort_pairs_impl<int32_t, 4>
  return reinterpret_cast<SortPairs>(dlsym(
      library, "_ZN2at4cuda3cub6detail21radix_sort_pairs_implIiLi4EEEvPKT_PS4_PKNS2_10OpaqueTypeIXT0_EEEPS9_lbll"));
}

Status sort_pairs(SortPairs sort, const int32_t* keys, int32_t* sorted_keys, const int32_t* numbers,
                  int32_t* sorted_numbers, int64_t n, int64_t bits) {
  try {
    sort(keys, sorted_keys, numbers, sorted_numbers, n, false, 0, bits);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    const bool refused = what.find("out of memory") != std::string::npos;
    return {refused ? Code::memory : Code::device, "[device] torch could not sort a batch's slots: " + what};
  }
  return {};
}

}  // namespace shoal
