#include "base/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <stdexcept>
#include <string>

#include "base/check.h"

namespace shoal {
namespace {

// Runs the tasks and checks that each ran once, before run() returned. The counters are plain: the pool must order them.
void check_run(int64_t tasks, int threads) {
  std::vector<int> times(static_cast<size_t>(tasks), 0);
  ThreadPool::instance().run(tasks, threads, [&](int64_t task) { ++times[static_cast<size_t>(task)]; });
  for (int64_t task = 0; task < tasks; ++task)
    CHECK(times[static_cast<size_t>(task)] == 1, task, tasks, threads, times[static_cast<size_t>(task)]);
}

void every_task_runs_exactly_once() {
  for (int threads : {1, 2, 3, 7, 16})
    for (int64_t tasks : {1, 2, 3, 15, 16, 17, 1000, 100000}) check_run(tasks, threads);
}

void no_tasks_call_nothing() {
  for (int64_t tasks : {int64_t{0}, int64_t{-1}})
    ThreadPool::instance().run(tasks, 4, [](int64_t task) { CHECK(false, task); });
}

void many_short_runs() {
  for (int i = 0; i < 20000; ++i) check_run(1 + i % 5, 1 + i % 4);
}

void no_more_threads_than_asked_for() {
  check_run(1000, 8);  // the pool has seven workers from now on
  for (int threads : {1, 2, 3}) {
    std::mutex mutex;
    std::set<std::thread::id> ran;
    ThreadPool::instance().run(200, threads, [&](int64_t) {
      std::lock_guard lock(mutex);
      ran.insert(std::this_thread::get_id());
    });
    CHECK(!ran.empty() && static_cast<int>(ran.size()) <= threads, ran.size(), threads);
  }
}

void one_thread_is_the_callers_and_goes_in_order() {
  std::vector<int64_t> order;
  std::thread::id caller = std::this_thread::get_id();
  ThreadPool::instance().run(100, 1, [&](int64_t task) {
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(task);
  });
  for (int64_t i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i, i);
}

void helpers_help() {
  // Each of two tasks waits for the other to start: one thread alone would never end.
  std::atomic<int> started{0};
  ThreadPool::instance().run(2, 2, [&](int64_t) {
    ++started;
    while (started.load() < 2) std::this_thread::yield();
  });
  CHECK(started.load() == 2);
}

void returns_when_the_slowest_is_done() {
  for (int i = 0; i < 30; ++i) {
    std::atomic<int> started{0};
    int done[2] = {};
    std::thread::id caller = std::this_thread::get_id();
    ThreadPool::instance().run(2, 2, [&](int64_t task) {
      ++started;
      while (started.load() < 2) std::this_thread::yield();
      if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      done[task] = 1;
    });
    CHECK(done[0] == 1 && done[1] == 1, i, done[0], done[1]);
  }
}

void seats_are_below_the_number_of_threads_and_one_threads_at_a_time() {
  for (int threads : {1, 2, 3, 7}) {
    std::vector<std::atomic<int>> in_use(static_cast<size_t>(threads));
    for (int i = 0; i < 200; ++i)
      ThreadPool::instance().run(20, threads, [&](int64_t, int seat) {
        CHECK(seat >= 0 && seat < threads, seat, threads);
        CHECK(in_use[static_cast<size_t>(seat)].fetch_add(1) == 0, seat, threads);
        if (i % 10 == 0) std::this_thread::yield();
        in_use[static_cast<size_t>(seat)].fetch_sub(1);
      });
  }
}

// The first task that each seat had. No thread goes on before all are here.
template <typename Tasks>
std::vector<int64_t> first_tasks(const Tasks& tasks, int threads) {
  std::vector<int64_t> first(static_cast<size_t>(threads), -1);
  std::atomic<int> here{0};
  ThreadPool::instance().run(tasks, threads, [&](int64_t task, int seat) {
    if (first[static_cast<size_t>(seat)] >= 0) return;
    first[static_cast<size_t>(seat)] = task;
    ++here;
    while (here.load() < threads) std::this_thread::yield();
  });
  return first;
}

void a_thread_begins_with_its_share_of_neighbours() {
  for (int i = 0; i < 50; ++i) {
    CHECK((first_tasks(int64_t{1000}, 2) == std::vector<int64_t>{0, 500}));
    CHECK((first_tasks(int64_t{10}, 4) == std::vector<int64_t>{0, 2, 5, 7}));
    // A large task, and many small ones that do as much together.
    std::vector<int64_t> work(101, 1);
    work[0] = 100;
    CHECK((first_tasks(work, 2) == std::vector<int64_t>{0, 1}));
  }
}

void a_task_runs_once_whatever_work_it_is() {
  for (int threads : {1, 2, 3, 7})
    for (const std::vector<int64_t>& work : {std::vector<int64_t>{0, 0, 0},
                                             {5},
                                             {0, 9, 0, 0, 1},
                                             {1, 1, 1, 1000},
                                             {1000, 1, 1, 1},
                                             {int64_t{1} << 60, 1}}) {
      std::vector<std::atomic<int>> times(work.size());
      ThreadPool::instance().run(work, threads, [&](int64_t task) { ++times[static_cast<size_t>(task)]; });
      for (const auto& n : times) CHECK(n.load() == 1, threads, n.load());
    }
}

void a_share_that_is_done_leaves_its_thread_to_the_others() {
  // Seat 1 gets through the second half, and then what seat 0, which waits in its first task, has left.
  std::atomic<int64_t> done{0};
  ThreadPool::instance().run(100, 2, [&](int64_t task, int seat) {
    if (task == 0 && seat == 0)
      while (done.load() < 99) std::this_thread::yield();
    ++done;
  });
  CHECK(done.load() == 100);
}

void a_seat_is_always_the_same_thread() {
  constexpr int kThreads = 4;
  std::vector<std::thread::id> at(kThreads);
  for (int i = 0; i < 300; ++i) {
    std::mutex mutex;
    ThreadPool::instance().run(64, 2 + i % 3, [&](int64_t, int seat) {
      std::lock_guard lock(mutex);
      std::thread::id& known = at[static_cast<size_t>(seat)];
      if (known == std::thread::id()) known = std::this_thread::get_id();
      CHECK(known == std::this_thread::get_id(), seat);
    });
  }
}

enum class Thrower { caller, helper, all };

// Both threads are in the body before one throws, and the one that does not is still in it some time after.
void check_throw(Thrower thrower) {
  std::atomic<int> started{0}, inside{0};
  int64_t ran[2] = {};
  std::thread::id caller = std::this_thread::get_id();
  std::string caught;
  try {
    ThreadPool::instance().run(1000000, 2, [&](int64_t, int seat) {
      ++inside;
      ++ran[seat];
      ++started;
      while (started.load() < 2) std::this_thread::yield();
      bool on_caller = std::this_thread::get_id() == caller;
      bool throws = thrower == Thrower::all || (thrower == Thrower::caller) == on_caller;
      if (!throws) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      --inside;
      if (throws) throw std::runtime_error(on_caller ? "caller" : "helper");
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(inside.load() == 0, inside.load());
  CHECK(caught == "caller" || caught == "helper", caught);
  if (thrower != Thrower::all) CHECK((caught == "caller") == (thrower == Thrower::caller), caught);
  // The thread that threw began nothing more, and the other hardly.
  CHECK(ran[0] + ran[1] < 1000, ran[0], ran[1]);
  check_run(1000, 2);
}

void an_exception_of_any_thread_reaches_the_caller() {
  for (int i = 0; i < 100; ++i)
    for (Thrower thrower : {Thrower::caller, Thrower::helper, Thrower::all}) check_throw(thrower);
  helpers_help();  // the pool is free again, and has its threads
}

void an_exception_of_one_thread_alone_ends_the_run() {
  int64_t ran = 0;
  try {
    ThreadPool::instance().run(10, 1, [&](int64_t task) {
      ++ran;
      if (task == 3) throw std::bad_alloc();
    });
    CHECK(false);
  } catch (const std::bad_alloc&) {
  }
  CHECK(ran == 4, ran);
}

void exceptions_of_many_callers_stay_apart() {
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([c] {
      for (int i = 0; i < 500; ++i) {
        int caught = -1;
        try {
          ThreadPool::instance().run(50, 3, [&](int64_t task) {
            if (task % 7 == i % 7) throw c;
          });
        } catch (int from) {
          caught = from;
        }
        CHECK(caught == c, caught, c);
        check_run(20, 3);
      }
    });
  for (std::thread& caller : callers) caller.join();
}

void callers_do_not_disturb_each_other() {
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([c] {
      for (int i = 0; i < 2000; ++i) check_run(1 + (i + c) % 50, 1 + (i + c) % 4);
    });
  for (std::thread& caller : callers) caller.join();
}

void a_task_may_call_the_pool() {
  constexpr int64_t kOuter = 50, kInner = 40;
  std::vector<int> times(kOuter * kInner, 0);
  ThreadPool::instance().run(kOuter, 3, [&](int64_t outer) {
    ThreadPool::instance().run(kInner, 3, [&](int64_t inner) { ++times[static_cast<size_t>(outer * kInner + inner)]; });
  });
  for (int n : times) CHECK(n == 1, n);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // their own locks do not survive a fork
void a_forked_child_has_a_pool_of_its_own() {
  check_run(100, 4);
  for (int generation = 0; generation < 3; ++generation) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      check_run(1000, 4);
      helpers_help();
      // So has a child of the child.
      pid_t grandchild = fork();
      if (grandchild == 0) {
        check_run(1000, 3);
        std::_Exit(0);
      }
      int status = 0;
      CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0, status);
      std::_Exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, status);
    check_run(1000, 4);
  }
}

void fewer_threads_do_the_work_where_the_system_has_no_more() {
  // In a child, whose pool has no threads yet: a thread's stack does not fit into what may be mapped.
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    with_memory_limit(1 << 20, [] {
      for (int i = 0; i < 10; ++i) check_run(100, 4);
    });
    check_run(100, 4);
    helpers_help();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0, status);
}

void a_child_forked_beside_a_busy_pool_works() {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) ThreadPool::instance().run(64, 3, [](int64_t) { std::this_thread::yield(); });
  });
  for (int i = 0; i < 10; ++i) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      check_run(1000, 3);
      std::_Exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, status);
  }
  stop.store(true);
  busy.join();
}
#endif

}  // namespace
}  // namespace shoal

int main() {
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  shoal::a_forked_child_has_a_pool_of_its_own();
#endif
  shoal::every_task_runs_exactly_once();
  shoal::no_tasks_call_nothing();
  shoal::many_short_runs();
  shoal::no_more_threads_than_asked_for();
  shoal::one_thread_is_the_callers_and_goes_in_order();
  shoal::helpers_help();
  shoal::returns_when_the_slowest_is_done();
  shoal::seats_are_below_the_number_of_threads_and_one_threads_at_a_time();
  shoal::a_thread_begins_with_its_share_of_neighbours();
  shoal::a_task_runs_once_whatever_work_it_is();
  shoal::a_share_that_is_done_leaves_its_thread_to_the_others();
  shoal::a_seat_is_always_the_same_thread();
  shoal::an_exception_of_any_thread_reaches_the_caller();
  shoal::an_exception_of_one_thread_alone_ends_the_run();
  shoal::exceptions_of_many_callers_stay_apart();
  shoal::callers_do_not_disturb_each_other();
  shoal::a_task_may_call_the_pool();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  shoal::fewer_threads_do_the_work_where_the_system_has_no_more();
  shoal::a_child_forked_beside_a_busy_pool_works();
#endif
}
