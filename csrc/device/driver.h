// The few calls of the CUDA driver that launches need. It is looked for at run time: the core is built without CUDA.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace shoal {

struct Driver {
  // As in cuda.h; results other than 0 are errors.
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  int (*fill_words)(unsigned long long address, unsigned word, size_t words, void* stream) = nullptr;
  int (*copy_to_host)(void* to, unsigned long long from, size_t bytes, void* stream) = nullptr;
  int (*record)(void* event, void* stream) = nullptr;
  int (*describe)(int error, const char** text) = nullptr;
};

// The machine's driver; a device error where there is none.
Status find_driver(Driver* driver);

}  // namespace shoal
