#include "base/thread_pool.h"

#include <algorithm>
#include <new>
#include <numeric>
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

// The first or the last task of a share; -1 where none is left.
static int64_t take(std::atomic<uint64_t>& left, bool first) {
  uint64_t now = left.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t begin = now >> 32, end = now & 0xffffffffu;
    if (begin >= end) return -1;
    const uint64_t rest = first ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
    if (left.compare_exchange_weak(now, rest, std::memory_order_relaxed))
      return static_cast<int64_t>(first ? begin : end - 1);
  }
}

void ThreadPool::take_tasks(int seat) noexcept {
  const size_t count = shares_.size(), own = static_cast<size_t>(seat);
  try {
    for (size_t i = 0; i < count; ++i) {
      std::atomic<uint64_t>& left = shares_[(own + i) % count].left;
      for (int64_t task; (task = take(left, i == 0)) >= 0;) job_.call(job_.body, task, seat);
    }
  } catch (...) {
    for (Share& share : shares_) share.left.store(0, std::memory_order_relaxed);
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::share_out(const Job& job, int threads) {
  int64_t total = job.tasks, done = 0, task = 0;
  if (job.work) total = std::accumulate(job.work, job.work + job.tasks, int64_t{0});
  for (int seat = 0; seat < threads; ++seat) {
    const auto begin = static_cast<uint64_t>(task);
    const int64_t until = total / threads * (seat + 1) + total % threads * (seat + 1) / threads;
    if (seat + 1 == threads)
      task = job.tasks;
    else if (!job.work)
      task = until;
    else  // a task that is in two shares by its work is in the one that has its middle
      while (task < job.tasks && done + (job.work[task] + 1) / 2 <= until) done += job.work[task++];
    shares_[static_cast<size_t>(seat)].left.store(begin << 32 | static_cast<uint64_t>(task), std::memory_order_relaxed);
  }
}

void ThreadPool::start_workers(int wanted) {
  try {
    while (static_cast<int>(workers_.size()) < wanted)
      workers_.emplace_back(
          [this, seat = static_cast<int>(workers_.size()) + 1, seen = generation_.load()] { work(seat, seen); });
  } catch (const std::system_error&) {
    // Those that are there do the work; the next call asks again.
  } catch (const std::bad_alloc&) {
  }
}

bool ThreadPool::make_shares(int threads) noexcept {
  try {
    if (static_cast<int>(shares_.size()) != threads) shares_ = std::vector<Share>(static_cast<size_t>(threads));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void ThreadPool::run_job(const Job& job, int threads) {
  if (job.tasks <= 0) return;
  threads = static_cast<int>(std::min<int64_t>(threads, job.tasks));
  const bool is_owned = threads > 1 && try_own();
  if (!is_owned || !make_shares(threads)) {
    if (is_owned) disown();
    for (int64_t task = 0; task < job.tasks; ++task) job.call(job.body, task, 0);
    return;
  }
  std::exception_ptr error = run_shared(job, threads);
  disown();
  if (error) std::rethrow_exception(std::move(error));
}

std::exception_ptr ThreadPool::run_shared(const Job& job, int threads) noexcept {
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    share_out(job, threads);
    seats_ = threads - 1;
    start_workers(threads - 1);
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

void ThreadPool::work(int seat, uint64_t seen) {
  // A step is a handful of short loops: a sleeping thread would come too late for most, so it looks for about 50 us.
  constexpr int kSpins = 2000;
  for (;;) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && ++spins < kSpins) relax();
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      seen = generation_.load();
      if (seat > seats_) continue;
      busy_.fetch_add(1, std::memory_order_relaxed);
    }
    take_tasks(seat);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace shoal
