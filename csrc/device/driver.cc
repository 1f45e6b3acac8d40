#include "device/driver.h"

#include <dlfcn.h>

namespace shoal {

namespace {

template <typename Function>
bool look_up(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

Status find_driver(Driver* driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {Code::device, "[device] wanted the CUDA driver, libcuda.so.1; there is none here."};
  if (look_up(library, "cuLaunchKernel", &driver->launch) &&
      look_up(library, "cuMemsetD32Async", &driver->fill_words) &&
      look_up(library, "cuMemcpyDtoHAsync_v2", &driver->copy_to_host) &&
      look_up(library, "cuEventRecord", &driver->record) && look_up(library, "cuGetErrorString", &driver->describe)) {
    return {};
  }
  return {Code::device, "[device] libcuda.so.1 lacks a call that launches need. Update the CUDA driver."};
}

}  // namespace shoal
