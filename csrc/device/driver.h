// The few calls of the CUDA driver that launches need. It is looked for at run time: the core is built without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace shoal {

// What nodes of a graph take, laid out as in cuda.h.
struct KernelNode {
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** arguments;
  void** extra;
  void* kernel;
  void* context;
};
struct FillNode {
  uint64_t address;
  size_t pitch;
  unsigned word;
  unsigned word_bytes;
  size_t words;
  size_t rows;
};
struct CopySide {
  size_t x, y, z, level;
  unsigned memory;  // kHostMemory or kDeviceMemory
  void* host;
  uint64_t device;
  void* array;
  void* reserved;
  size_t pitch, height;
};
struct CopyNode {
  CopySide from, to;
  size_t bytes, rows, layers;
};
inline constexpr unsigned kHostMemory = 1, kDeviceMemory = 2;

// Graphs: launches that are handed over once, and from then on started in one go. All null where the driver has none.
struct GraphDriver {
  int (*is_capturing)(void* stream, int* status) = nullptr;
  int (*create_stream)(void** stream, unsigned flags) = nullptr;
  int (*destroy_stream)(void* stream) = nullptr;
  int (*begin_capture)(void* stream, int mode) = nullptr;
  int (*end_capture)(void* stream, void** graph) = nullptr;
  int (*create)(void** graph, unsigned flags) = nullptr;
  int (*add_kernel)(void** node, void* graph, void* const* before, size_t count, const KernelNode*) = nullptr;
  int (*add_fill)(void** node, void* graph, void* const* before, size_t count, const FillNode*,
                  void* context) = nullptr;
  int (*add_copy)(void** node, void* graph, void* const* before, size_t count, const CopyNode*,
                  void* context) = nullptr;
  int (*add_record)(void** node, void* graph, void* const* before, size_t count, void* event) = nullptr;
  int (*instantiate)(void** started, void* graph, unsigned long long flags) = nullptr;
  int (*set_kernel)(void* started, void* node, const KernelNode*) = nullptr;
  int (*set_fill)(void* started, void* node, const FillNode*, void* context) = nullptr;
  int (*set_copy)(void* started, void* node, const CopyNode*, void* context) = nullptr;
  int (*set_record)(void* started, void* node, void* event) = nullptr;
  int (*set_enabled)(void* started, void* node, unsigned enabled) = nullptr;
  int (*launch)(void* started, void* stream) = nullptr;
  int (*destroy_started)(void* started) = nullptr;
  int (*destroy)(void* graph) = nullptr;
};

inline constexpr unsigned kStreamApart = 1;  // waits for no other by itself
inline constexpr int kCaptureRelaxed = 2;    // other calls stay allowed

struct Driver {
  // As in cuda.h; results other than 0 are errors.
  int (*context)(void** context) = nullptr;  // of this thread, null if it has none
  int (*set_context)(void* context) = nullptr;
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  int (*fill_words)(unsigned long long address, unsigned word, size_t words, void* stream) = nullptr;
  int (*copy_to_host)(void* to, unsigned long long from, size_t bytes, void* stream) = nullptr;
  int (*record)(void* event, void* stream) = nullptr;
  int (*describe)(int error, const char** text) = nullptr;
  GraphDriver graphs;
};

// The machine's driver; a device error where there is none.
Status find_driver(Driver* driver);

// "[device] the CUDA driver refused WHAT: its words (number)."
Status driver_failed(const Driver& driver, const char* what, int error);

}  // namespace shoal
