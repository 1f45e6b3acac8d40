// One pool of threads for the process. A call splits its work into tasks that any thread may take, so that results
// must not (and do not) depend on who ran which.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/per_process.h"

namespace shoal {

// How many of `threads` are worth waking for so much work: one for every `unit`, since a wake costs a few microseconds.
inline int threads_for(int64_t work, int64_t unit, int threads) {
  return static_cast<int>(std::clamp<int64_t>(work / unit, 1, threads < 1 ? 1 : threads));
}

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Runs body(task), or body(task, seat), for each task in [0, tasks), on at most `threads` threads including the
  // caller's; returns when all are done. `seat` is a number below `threads` that no other thread has meanwhile.
  // Where a body throws, tasks that nobody has begun are left out, and the first exception is thrown here once all
  // threads are out of the body. Fewer threads help where the system has no more.
  // Calls from several threads are safe: while one call has the pool, others run on their own thread.
  template <typename Body>
  void run(int64_t tasks, int threads, const Body& body) {
    if (tasks <= 0) return;
    if (tasks == 1 || threads <= 1 || !try_own()) {
      for (int64_t task = 0; task < tasks; ++task) call<Body>(&body, task, 0);
      return;
    }
    std::exception_ptr error = run_shared({&call<Body>, &body, tasks}, threads);
    disown();
    if (error) std::rethrow_exception(std::move(error));
  }

 private:
  struct Job {
    void (*call)(const void*, int64_t task, int seat) = nullptr;
    const void* body = nullptr;
    int64_t tasks = 0;
  };

  template <typename Body>
  static void call(const void* body, int64_t task, int seat) {
    if constexpr (std::is_invocable_v<const Body&, int64_t, int>)
      (*static_cast<const Body*>(body))(task, seat);
    else
      (*static_cast<const Body*>(body))(task);
  }

  friend class PerProcess<ThreadPool>;
  ThreadPool() = default;
  bool try_own() { return !owned_.exchange(true, std::memory_order_acquire); }
  void disown() { owned_.store(false, std::memory_order_release); }
  std::exception_ptr run_shared(Job job, int threads) noexcept;
  void start_workers(int wanted);
  void work(uint64_t seen);
  void take_tasks(int seat) noexcept;

  std::atomic<bool> owned_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  // job_, seats_ and error_ change only under mutex_. A worker that takes a seat counts itself busy before it lets the
  // mutex go, so a caller who has closed the seats and sees nobody busy owns the job again.
  std::atomic<uint64_t> generation_{0};
  Job job_;
  int seats_ = 0;  // that nobody has taken; the caller's is number 0
  std::exception_ptr error_;
  std::atomic<int> busy_{0};
  std::atomic<int64_t> next_{0};
};

}  // namespace shoal
