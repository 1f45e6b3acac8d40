#include "base/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

constexpr size_t kPage = 4096;

size_t resident_bytes() {
  size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Pages mapped(size_t bytes) {
  Pages pages;
  Status status = Pages::map(bytes, &pages);
  CHECK(status.ok(), bytes, status.message());
  return pages;
}

bool all_equal(const char* data, size_t n, char value) {
  return n == 0 || (data[0] == value && std::memcmp(data, data + 1, n - 1) == 0);
}

void mapping_is_aligned_zero_and_large_enough() {
  for (size_t bytes : {size_t{0}, size_t{1}, kPage, kHugePage - 1, kHugePage, kHugePage + 1, 5 * kHugePage}) {
    Pages pages = mapped(bytes);
    CHECK(pages);
    CHECK(reinterpret_cast<uintptr_t>(pages.data()) % kHugePage == 0, bytes);
    CHECK(pages.size() >= bytes && pages.size() >= kHugePage && pages.size() < bytes + 2 * kHugePage, bytes,
          pages.size());
    CHECK(all_equal(pages.data(), pages.size(), 0), bytes);
  }
}

void moving_hands_over_the_mapping() {
  Pages pages = mapped(kHugePage);
  char* data = pages.data();
  data[3] = 'x';
  Pages other(std::move(pages));
  CHECK(!pages && pages.size() == 0);
  CHECK(other.data() == data && other.data()[3] == 'x');
  Pages third = mapped(2 * kHugePage);
  third = std::move(other);
  CHECK(!other && third.data() == data && third.size() == kHugePage && data[3] == 'x');
  Pages& self = third;
  third = std::move(self);
  CHECK(third.data() == data && data[3] == 'x');
}

void impossible_sizes_are_refused() {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  for (size_t bytes : {kMost, kMost - kPage, kMost - kHugePage, kMost - 2 * kHugePage, kMost / 2}) {
    Pages pages;
    Status status = Pages::map(bytes, &pages);
    CHECK(status.code() == Code::memory, bytes, pages.size());
    CHECK(!pages);
    CHECK(status.message().find(std::to_string(bytes)) != std::string::npos, status.message());
  }
}

void discarded_pages_read_as_zero_and_leave_memory() {
  constexpr size_t kBytes = 32 * kHugePage;
  for (bool huge : {false, true}) {
    Pages pages = mapped(kBytes);
    if (huge) pages.advise_huge();
    std::memset(pages.data(), 7, kBytes);
    size_t before = resident_bytes();
    // The page that `from` falls into stays; whole pages after it go.
    size_t from = 3 * kPage + 64;
    pages.discard(from);
    CHECK(all_equal(pages.data(), 4 * kPage, 7), huge);
    CHECK(all_equal(pages.data() + 4 * kPage, kBytes - 4 * kPage, 0), huge);
    CHECK(resident_bytes() + kBytes / 2 < before, huge, resident_bytes(), before);
    std::memset(pages.data() + kBytes - kPage, 5, kPage);
    CHECK(all_equal(pages.data() + kBytes - kPage, kPage, 5));
    pages.discard(kBytes);
    CHECK(all_equal(pages.data() + kBytes - kPage, kPage, 5));
    pages.discard(0);
    CHECK(all_equal(pages.data(), kBytes, 0), huge);
    std::memset(pages.data(), 7, 8 * kPage);
    pages.discard(kPage + 64, 4 * kPage + 64);  // whole pages of a part alone
    CHECK(all_equal(pages.data(), 2 * kPage, 7) && all_equal(pages.data() + 4 * kPage, 4 * kPage, 7), huge);
    CHECK(all_equal(pages.data() + 2 * kPage, 2 * kPage, 0), huge);
    pages.discard(5 * kPage, 5 * kPage + 64);
    CHECK(all_equal(pages.data() + 4 * kPage, 4 * kPage, 7), huge);
  }
  Pages none;
  none.discard(0);
}

void collapsing_keeps_the_contents() {
  constexpr size_t kBytes = 4 * kHugePage;
  Pages pages = mapped(kBytes);
  for (size_t at = 0; at < kBytes / 2; at += 512) pages.data()[at] = static_cast<char>(at / 512 % 127);
  for (int times = 0; times < 2; ++times) {
    pages.collapse();
    for (size_t at = 0; at < kBytes / 2; at += 512)
      CHECK(pages.data()[at] == static_cast<char>(at / 512 % 127), at, times);
    CHECK(all_equal(pages.data() + kBytes / 2, kBytes / 2, 0));
  }
  pages.discard(kHugePage);
  CHECK(pages.data()[512] == 1);
  CHECK(all_equal(pages.data() + kHugePage, kBytes - kHugePage, 0));
  Pages none;
  none.collapse();
}

void populated_pages_are_resident_and_keep_their_contents() {
  constexpr size_t kBytes = 32 * kHugePage;
  Pages pages = mapped(kBytes);
  pages.data()[kPage] = 'x';
  size_t before = resident_bytes();
  pages.populate(kPage + 5, kBytes - kPage - 5);
  // A kernel that does not know how leaves it as it was.
  size_t grown = resident_bytes() - before;
  CHECK(grown < kHugePage || grown + kHugePage > kBytes, grown);
  CHECK(pages.data()[kPage] == 'x' && all_equal(pages.data() + 2 * kPage, kBytes - 2 * kPage, 0));
  pages.populate(0, 10 * kBytes);
  pages.populate(kBytes, kBytes);
  pages.populate(5 * kPage, kPage);
  CHECK(pages.data()[kPage] == 'x' && all_equal(pages.data() + 2 * kPage, kBytes - 2 * kPage, 0));
  Pages none;
  none.populate(0, kPage);
}

void unmapped_pages_leave_memory() {
  constexpr size_t kBytes = 32 * kHugePage;
  Pages pages = mapped(kBytes);
  std::memset(pages.data(), 1, kBytes);
  size_t before = resident_bytes();
  pages = Pages();
  CHECK(resident_bytes() + kBytes / 2 < before, resident_bytes(), before);
}

void buffers_are_reused() {
  Buffers& buffers = Buffers::instance();
  CHECK(buffers.idle_bytes() == 0);
  void* first = buffers.acquire(10 * kHugePage);
  CHECK(first && buffers.idle_bytes() == 0);
  std::memset(first, 1, 10 * kHugePage);
  void* second = buffers.acquire(10 * kHugePage);
  CHECK(second && second != first);
  buffers.release(first);
  CHECK(buffers.idle_bytes() == 10 * kHugePage, buffers.idle_bytes());
  CHECK(buffers.acquire(9 * kHugePage + 5) == first);
  CHECK(buffers.idle_bytes() == 0);
  buffers.release(second);
  // One that is far too large is kept for a caller that needs it.
  void* small = buffers.acquire(100);
  CHECK(small && small != second);
  CHECK(buffers.acquire(8 * kHugePage) == second);
  for (void* data : {first, second, small}) buffers.release(data);
}

void the_best_fit_is_chosen() {
  Buffers& buffers = Buffers::instance();
  void* large = buffers.acquire(40 * kHugePage);
  void* middle = buffers.acquire(30 * kHugePage);
  buffers.release(large);
  buffers.release(middle);
  CHECK(buffers.acquire(25 * kHugePage) == middle);
  CHECK(buffers.acquire(25 * kHugePage) == large);
  buffers.release(large);
  buffers.release(middle);
}

void idle_buffers_are_few_and_the_oldest_goes_first() {
  Buffers& buffers = Buffers::instance();
  std::vector<void*> lent;
  for (size_t i = 0; i < 20; ++i) lent.push_back(buffers.acquire(100 * kHugePage));
  for (void* data : lent) buffers.release(data);
  CHECK(buffers.idle_bytes() == 12 * 100 * kHugePage, buffers.idle_bytes());
  std::vector<void*> kept;
  for (size_t i = 0; i < 12; ++i) kept.push_back(buffers.acquire(100 * kHugePage));
  CHECK(buffers.idle_bytes() == 0);
  for (size_t i = 8; i < 20; ++i) CHECK(std::find(kept.begin(), kept.end(), lent[i]) != kept.end(), i);
  for (void* data : kept) buffers.release(data);
}

void a_stranger_is_ignored() {
  size_t before = Buffers::instance().idle_bytes();
  int stranger = 0;
  Buffers::instance().release(&stranger);
  Buffers::instance().release(nullptr);
  CHECK(Buffers::instance().idle_bytes() == before);
}

void too_large_a_buffer_is_null() {
  CHECK(Buffers::instance().acquire(std::numeric_limits<size_t>::max() / 2) == nullptr);
}

void buffers_serve_many_threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      Random random(static_cast<uint64_t>(t));
      for (int i = 0; i < 500; ++i) {
        size_t bytes = static_cast<size_t>(random.below(4 * static_cast<int64_t>(kHugePage)) + 1);
        char* data = static_cast<char*>(Buffers::instance().acquire(bytes));
        CHECK(data);
        data[0] = data[bytes - 1] = static_cast<char>(t);
        std::this_thread::yield();
        CHECK(data[0] == static_cast<char>(t) && data[bytes - 1] == static_cast<char>(t), t, bytes);
        Buffers::instance().release(data);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::mapping_is_aligned_zero_and_large_enough();
  shoal::moving_hands_over_the_mapping();
  shoal::impossible_sizes_are_refused();
  shoal::discarded_pages_read_as_zero_and_leave_memory();
  shoal::collapsing_keeps_the_contents();
  shoal::populated_pages_are_resident_and_keep_their_contents();
  shoal::unmapped_pages_leave_memory();
  shoal::buffers_are_reused();
  shoal::the_best_fit_is_chosen();
  shoal::idle_buffers_are_few_and_the_oldest_goes_first();
  shoal::a_stranger_is_ignored();
  shoal::too_large_a_buffer_is_null();
  shoal::buffers_serve_many_threads();
}
