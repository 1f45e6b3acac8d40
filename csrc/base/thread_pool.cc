#include "base/thread_pool.h"

#include <pthread.h>

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

static std::atomic<ThreadPool*> g_pool{nullptr};

static void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = g_pool.load(std::memory_order_acquire);
  if (pool) return *pool;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!g_pool.load()) {
    static std::once_flag once;
    // A forked child has none of the threads: it starts with a new pool and leaves the old one's memory alone.
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); }); });
    g_pool.store(new ThreadPool, std::memory_order_release);
  }
  return *g_pool.load();
}

void ThreadPool::take_tasks() {
  for (;;) {
    int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= job_.tasks) return;
    job_.call(job_.body, task);
  }
}

void ThreadPool::run_shared(Job job, int threads) {
  int helpers = static_cast<int>(std::min<int64_t>(threads, job.tasks)) - 1;
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    seats_ = helpers;
    while (static_cast<int>(workers_.size()) < helpers)
      workers_.emplace_back([this, seen = generation_.load()] { work(seen); });
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  take_tasks();
  {
    std::lock_guard lock(mutex_);
    seats_ = 0;
  }
  while (busy_.load(std::memory_order_acquire) != 0) relax();
}

void ThreadPool::work(uint64_t seen) {
  // A step is a handful of short loops: a sleeping thread would come too late for most, so it looks for about 50 us.
  constexpr int kSpins = 2000;
  for (;;) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && ++spins < kSpins) relax();
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      seen = generation_.load();
      if (seats_ == 0) continue;
      --seats_;
      busy_.fetch_add(1, std::memory_order_relaxed);
    }
    take_tasks();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace shoal
