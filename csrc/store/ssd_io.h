// What writing to, reading from and collecting a store on disk have in common.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <new>
#include <utility>

#include "base/io.h"
#include "base/memory.h"
#include "base/status.h"

namespace shoal {

constexpr int64_t kWriteBytes = int64_t{2} << 20;  // of one request; 1 MiB is 8 % slower, 256 KiB 60 %

// Memory for reads and writes past the page cache: whole pages, kept from call to call.
class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t bytes) : at_(static_cast<char*>(Buffers::instance().acquire(size_t(bytes)))) {
    if (at_ == nullptr) throw std::bad_alloc();
  }
  ~AlignedMemory() { Buffers::instance().release(at_); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  char* get() const { return at_; }

 private:
  char* at_;
};

inline int64_t nanoseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

// Whether a request failed because the system had no memory for it: the disk was not asked.
inline bool was_not_made(const IoRequest& answered) {
  return answered.moved == -ENOMEM || answered.moved == -EMFILE || answered.moved == -ENFILE ||
         answered.moved == -EAGAIN;
}

inline void keep_first(Status* first, Status other) {
  if (first->ok()) *first = std::move(other);
}

}  // namespace shoal
