// Memory from the OS: anonymous pages for slabs and index chunks, and reusable buffers for large outputs.
// The one place that calls mmap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/status.h"

namespace shoal {

inline constexpr size_t kHugePage = size_t{2} << 20;

// An anonymous mapping aligned to a huge page, zero-filled. Nothing is resident until it is touched.
class Pages {
 public:
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  ~Pages();

  static Status map(size_t bytes, Pages* out);

  char* data() const { return data_; }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Asks for huge pages: what is touched from now on comes in pages of 2 MiB where the kernel grants them.
  void advise_huge();
  // The same for what was touched already: copied into huge pages now, or left to the kernel if it cannot.
  void collapse();
  // Makes [from, to) resident now, in one call instead of a fault for every page. False if the system refused.
  bool populate(size_t from, size_t to);
  // Gives the whole pages of [from, to) back to the OS, up to the end if `to` is not given; they read as zero afterwards.
  void discard(size_t from, size_t to = SIZE_MAX);

 private:
  void unmap();
  char* data_ = nullptr;
  size_t size_ = 0;
  bool huge_ = false;
};

// Buffers for large outputs. A fresh one costs a page fault for every 4 KiB, three times the gather that fills it,
// so released ones are kept for the next call. Thread-safe.
class Buffers {
 public:
  static Buffers& instance();

  // Null where the OS has no memory; throws std::bad_alloc where the heap has none.
  void* acquire(size_t bytes);
  void release(void* data) noexcept;
  // Bytes kept for reuse.
  size_t idle_bytes();

 private:
  struct Block {
    Pages pages;
    uint64_t last_use;
  };
  // Enough for what batches in flight give back between one's lookup and the next one's: outputs, slots, and keys of those
  // that come. With fewer, a step with prefetch maps some anew, and clears 2 MiB for each. The oldest is unmapped first.
  static constexpr size_t kMaxIdle = 12;
  std::mutex mutex_;
  uint64_t clock_ = 0;
  std::vector<Block> idle_;
  std::vector<Block> lent_;
};

// An uninitialised array for as long as it lives: a reusable buffer if it is large, else from the heap.
template <typename T>
class Kept {
 public:
  // Throws std::bad_alloc, as any allocation.
  explicit Kept(size_t n) : large_(n * sizeof(T) >= kLarge) {
    data_ = large_ ? static_cast<T*>(Buffers::instance().acquire(n * sizeof(T))) : new T[n];
    if (!data_) throw std::bad_alloc();
  }
  ~Kept() {
    if (large_)
      Buffers::instance().release(data_);
    else
      delete[] data_;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  Kept(Kept&& other) noexcept : data_(std::exchange(other.data_, nullptr)), large_(other.large_) {}
  Kept& operator=(Kept&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(large_, other.large_);
    return *this;
  }

  T* get() const { return data_; }

 private:
  // A fresh one's page faults cost a tenth of a lookup.
  static constexpr size_t kLarge = size_t{1} << 17;
  T* data_;
  bool large_;
};

}  // namespace shoal
