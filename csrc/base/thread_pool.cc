#include "base/thread_pool.h"

#include <algorithm>
#include <new>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

static void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

ThreadPool& ThreadPool::instance() { return PerProcess<ThreadPool>::get(); }

void ThreadPool::take_tasks(int seat) noexcept {
  try {
    for (;;) {
      int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= job_.tasks) return;
      job_.call(job_.body, task, seat);
    }
  } catch (...) {
    next_.store(job_.tasks, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::start_workers(int wanted) {
  try {
    while (static_cast<int>(workers_.size()) < wanted)
      workers_.emplace_back([this, seen = generation_.load()] { work(seen); });
  } catch (const std::system_error&) {
    // Those that are there do the work; the next call asks again.
  } catch (const std::bad_alloc&) {
  }
}

std::exception_ptr ThreadPool::run_shared(Job job, int threads) noexcept {
  int helpers = static_cast<int>(std::min<int64_t>(threads, job.tasks)) - 1;
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    seats_ = helpers;
    start_workers(helpers);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  take_tasks(0);
  {
    std::lock_guard lock(mutex_);
    seats_ = 0;
  }
  // Most often a helper is in its last task. One that is not running wants the core that this thread spins on.
  constexpr int kSpins = 4000;
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins)
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  return std::exchange(error_, nullptr);
}

void ThreadPool::work(uint64_t seen) {
  // A step is a handful of short loops: a sleeping thread would come too late for most, so it looks for about 50 us.
  constexpr int kSpins = 2000;
  for (;;) {
    int spins = 0, seat = 0;
    while (generation_.load(std::memory_order_acquire) == seen && ++spins < kSpins) relax();
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      seen = generation_.load();
      if (seats_ == 0) continue;
      seat = seats_--;
      busy_.fetch_add(1, std::memory_order_relaxed);
    }
    take_tasks(seat);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace shoal
