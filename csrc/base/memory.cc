#include "base/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/per_process.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace shoal {

static Status refused(size_t bytes) {
  try {
    return {Code::memory, "the operating system refused " + std::to_string(bytes) + " bytes of memory"};
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
}

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

Pages::Pages(Pages&& other) noexcept { *this = std::move(other); }

Pages& Pages::operator=(Pages&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    huge_ = std::exchange(other.huge_, false);
  }
  return *this;
}

Pages::~Pages() { unmap(); }

void Pages::unmap() {
  if (data_) munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

Status Pages::map(size_t bytes, Pages* out) {
  bool fits = bytes <= SIZE_MAX - 2 * kHugePage;
  size_t size = fits ? round_up(std::max<size_t>(bytes, 1), kHugePage) : 0, padded = size + kHugePage;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* raw = fits ? mmap(nullptr, padded, PROT_READ | PROT_WRITE, kFlags, -1, 0) : MAP_FAILED;
  if (raw == MAP_FAILED) return refused(bytes);
  char* begin = static_cast<char*>(raw);
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, aligned - begin);
  if (begin + padded > aligned + size) munmap(aligned + size, begin + padded - (aligned + size));
  // Where the system gives huge pages to everyone, small tables would still be resident by 2 MiB.
  madvise(aligned, size, MADV_NOHUGEPAGE);
  Pages pages;
  pages.data_ = aligned;
  pages.size_ = size;
  *out = std::move(pages);
  return {};
}

void Pages::advise_huge() {
  if (!huge_ && data_) madvise(data_, size_, MADV_HUGEPAGE);
  huge_ = true;
}

void Pages::collapse() {
  if (huge_ || !data_) return;
  advise_huge();
  madvise(data_, size_, MADV_COLLAPSE);
}

bool Pages::populate(size_t from, size_t to) {
  from = from / 4096 * 4096;
  to = std::min(round_up(to, 4096), size_);
  // Where the kernel does not know it, the pages come when they are touched.
  return !data_ || from >= to || madvise(data_ + from, to - from, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

void Pages::discard(size_t from, size_t to) {
  from = round_up(from, 4096);
  to = std::min(to, size_) / 4096 * 4096;
  if (data_ && from < to) madvise(data_ + from, to - from, MADV_DONTNEED);
}

Buffers& Buffers::instance() { return PerProcess<Buffers>::get(); }

void* Buffers::acquire(size_t bytes) {
  std::lock_guard lock(mutex_);
  idle_.reserve(kMaxIdle + 1);  // a release must not throw
  auto best = idle_.end();
  for (auto block = idle_.begin(); block != idle_.end(); ++block)
    if (block->pages.size() >= bytes && block->pages.size() <= 2 * bytes + kHugePage &&
        (best == idle_.end() || block->pages.size() < best->pages.size()))
      best = block;
  if (best == idle_.end()) {
    Pages pages;
    if (!Pages::map(bytes, &pages).ok()) return nullptr;
    // A small one would be 2 MiB from its first byte on.
    if (bytes >= kHugePage / 2) pages.advise_huge();
    lent_.push_back({std::move(pages), 0});
  } else {
    lent_.push_back(std::move(*best));
    idle_.erase(best);
  }
  return lent_.back().pages.data();
}

void Buffers::release(void* data) noexcept {
  std::lock_guard lock(mutex_);
  auto block = std::find_if(lent_.begin(), lent_.end(), [&](const Block& b) { return b.pages.data() == data; });
  if (block == lent_.end()) return;
  block->last_use = ++clock_;
  idle_.push_back(std::move(*block));
  lent_.erase(block);
  if (idle_.size() > kMaxIdle)
    idle_.erase(std::min_element(idle_.begin(), idle_.end(),
                                 [](const Block& a, const Block& b) { return a.last_use < b.last_use; }));
}

size_t Buffers::idle_bytes() {
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const Block& block : idle_) bytes += block.pages.size();
  return bytes;
}

}  // namespace shoal
