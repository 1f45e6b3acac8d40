// One pool of threads for the process. A call splits its work into tasks that any thread may take, so that results
// must not (and do not) depend on who ran which.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal {

// How many of `threads` are worth waking for so much work: one for every `unit`, since a wake costs a few microseconds.
inline int threads_for(int64_t work, int64_t unit, int threads) {
  return static_cast<int>(std::clamp<int64_t>(work / unit, 1, threads < 1 ? 1 : threads));
}

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Runs body(task) for each task in [0, tasks), on at most `threads` threads including the caller's; returns when all
  // are done. Calls from several threads are safe: while one call has the pool, others run on their own thread.
  // REQUIRES: body throws nothing.
  template <typename Body>
  void run(int64_t tasks, int threads, const Body& body) {
    if (tasks <= 0) return;
    if (tasks == 1 || threads <= 1 || !try_own()) {
      for (int64_t task = 0; task < tasks; ++task) body(task);
      return;
    }
    run_shared({[](const void* f, int64_t task) { (*static_cast<const Body*>(f))(task); }, &body, tasks}, threads);
    disown();
  }

 private:
  struct Job {
    void (*call)(const void*, int64_t) = nullptr;
    const void* body = nullptr;
    int64_t tasks = 0;
  };

  // Never destroyed: its threads would outlive the static destructors of whoever still calls.
  ThreadPool() = default;
  bool try_own() { return !owned_.exchange(true, std::memory_order_acquire); }
  void disown() { owned_.store(false, std::memory_order_release); }
  void run_shared(Job job, int threads);
  void work(uint64_t seen);
  void take_tasks();

  std::atomic<bool> owned_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  // job_ and seats_ change only under mutex_. A worker that takes a seat counts itself busy before it lets the mutex go,
  // so a caller who has closed the seats and sees nobody busy owns the job again.
  std::atomic<uint64_t> generation_{0};
  Job job_;
  int seats_ = 0;
  std::atomic<int> busy_{0};
  std::atomic<int64_t> next_{0};
};

}  // namespace shoal
