#include "kernels/hash_ids.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/thread_pool.h"
#include "base/xxh64.h"

namespace shoal {

// A task hashes so many strings: some 50 microseconds of short ones, to which a wake of a thread adds little.
static constexpr int64_t kStringsEach = 8192;

// The first string that any task found to be wrong.
class FirstWrong {
 public:
  void found(int64_t at) {
    int64_t before = first_.load(std::memory_order_relaxed);
    while (at < before && !first_.compare_exchange_weak(before, at, std::memory_order_relaxed)) {
    }
  }
  int64_t get() const {
    int64_t first = first_.load(std::memory_order_relaxed);
    return first == INT64_MAX ? kNoneWrong : first;
  }

 private:
  std::atomic<int64_t> first_{INT64_MAX};
};

// Runs body(begin, end) on pieces of [0, n).
template <typename Body>
static void in_pieces(int64_t n, int threads, const Body& body) {
  int64_t tasks = (n + kStringsEach - 1) / kStringsEach;
  ThreadPool::instance().run(tasks, threads_for(n, kStringsEach, threads),
                             [&](int64_t task) { body(task * kStringsEach, std::min(n, (task + 1) * kStringsEach)); });
}

template <typename Offset>
int64_t hash_strings(const char* data, int64_t bytes, const Offset* offsets, int64_t n, int64_t* out, int threads) {
  FirstWrong wrong;
  in_pieces(n, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t from = offsets[i], to = offsets[i + 1];
      if (from < 0 || to < from || to > bytes) [[unlikely]] {
        wrong.found(i);
        return;
      }
      out[i] = static_cast<int64_t>(xxh64(data + from, static_cast<size_t>(to - from)));
    }
  });
  return wrong.get();
}

template int64_t hash_strings(const char*, int64_t, const int32_t*, int64_t, int64_t*, int);
template int64_t hash_strings(const char*, int64_t, const int64_t*, int64_t, int64_t*, int);

void hash_padded(const char* data, int64_t width, int64_t n, int64_t* out, int threads) {
  in_pieces(n, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* text = data + i * width;
      int64_t length = width;
      while (length && text[length - 1] == 0) --length;
      out[i] = static_cast<int64_t>(xxh64(text, static_cast<size_t>(length)));
    }
  });
}

// Appends the UTF-8 of a code point; returns null if it has none.
static char* put_utf8(uint32_t point, char* to) {
  if (point < 0x80) {
    *to++ = static_cast<char>(point);
    return to;
  }
  if (point < 0x800) {
    *to++ = static_cast<char>(0xc0 | point >> 6);
  } else if (point < 0x10000) {
    if (point >= 0xd800 && point < 0xe000) return nullptr;
    *to++ = static_cast<char>(0xe0 | point >> 12);
    *to++ = static_cast<char>(0x80 | (point >> 6 & 0x3f));
  } else {
    if (point > 0x10ffff) return nullptr;
    *to++ = static_cast<char>(0xf0 | point >> 18);
    *to++ = static_cast<char>(0x80 | (point >> 12 & 0x3f));
    *to++ = static_cast<char>(0x80 | (point >> 6 & 0x3f));
  }
  *to++ = static_cast<char>(0x80 | (point & 0x3f));
  return to;
}

int64_t hash_utf32(const uint32_t* data, int64_t width, int64_t n, int64_t* out, int threads) {
  FirstWrong wrong;
  in_pieces(n, threads, [&](int64_t begin, int64_t end) {
    std::vector<char> utf8(static_cast<size_t>(width) * 4);
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t* points = data + i * width;
      int64_t length = width;
      while (length && points[length - 1] == 0) --length;
      char* to = utf8.data();
      for (int64_t at = 0; at < length; ++at) {
        to = put_utf8(points[at], to);
        if (!to) [[unlikely]] {
          wrong.found(i);
          return;
        }
      }
      out[i] = static_cast<int64_t>(xxh64(utf8.data(), static_cast<size_t>(to - utf8.data())));
    }
  });
  return wrong.get();
}

}  // namespace shoal
