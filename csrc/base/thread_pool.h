// One pool of threads for the process. A call splits its work into tasks that any thread may take, so that results
// must not (and do not) depend on which thread ran which.
//
// Each thread begins with a share of neighbouring tasks, and takes tasks of other shares when its own are done. A seat is
// always the same thread, and shares follow from the tasks alone: calls whose tasks stand in the same order give the same
// memory to the same thread, whose core has it in its cache. Where two cores share no cache, a line that another core has
// takes 200 ns to come, and a store waits for it.
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
  // Where a body throws, tasks that have not begun are left out, and the first exception is thrown here once all
  // threads are out of the body. Fewer threads help where the system has no more.
  // Calls from several threads are safe: while one call has the pool, others run on their own thread.
  // REQUIRES: tasks < 2^32.
  template <typename Body>
  void run(int64_t tasks, int threads, const Body& body) {
    run_job({&call<Body>, &body, tasks, nullptr}, threads);
  }

  // The same for as many tasks as `work` has numbers, with shares of equal work: work[i] is how much task i does.
  template <typename Body>
  void run(const std::vector<int64_t>& work, int threads, const Body& body) {
    run_job({&call<Body>, &body, static_cast<int64_t>(work.size()), work.data()}, threads);
  }

 private:
  struct Job {
    void (*call)(const void*, int64_t task, int seat) = nullptr;
    const void* body = nullptr;
    int64_t tasks = 0;
    const int64_t* work = nullptr;  // of each task; null where all do the same
  };

  // The tasks of a share that have not begun. On a line of its own: other threads look at it at the end only.
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};  // begin << 32 | end
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
  void run_job(const Job& job, int threads);
  std::exception_ptr run_shared(const Job& job, int threads) noexcept;
  void start_workers(int wanted);
  void work(int seat, uint64_t seen);
  bool make_shares(int threads) noexcept;
  void share_out(const Job& job, int threads);
  void take_tasks(int seat) noexcept;

  std::atomic<bool> owned_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  // job_, seats_ and error_ change only under mutex_, shares_ while no worker is busy. A worker counts itself busy under
  // mutex_. So once seats_ is 0 and no worker is busy, none will touch the job.
  std::atomic<uint64_t> generation_{0};
  Job job_;
  int seats_ = 0;  // the highest that is open to its worker; the caller's is number 0
  std::vector<Share> shares_;
  std::exception_ptr error_;
  std::atomic<int> busy_{0};
};

}  // namespace shoal
