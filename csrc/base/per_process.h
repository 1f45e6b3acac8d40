// What a process has one of, and a forked child must not share: its threads are gone there, and its mutexes may be held.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace shoal {

// Made when first asked for, and never destroyed. A forked child makes its own and leaves the parent's memory alone.
template <typename T>
class PerProcess {
 public:
  static T& get() {
    T* made = made_.load(std::memory_order_acquire);
    return made ? *made : make();
  }

 private:
  static T& make() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { made_.store(nullptr); }); });
    T* mine = new T;
    T* first = nullptr;
    if (made_.compare_exchange_strong(first, mine, std::memory_order_acq_rel)) return *mine;
    delete mine;
    return *first;
  }

  inline static std::atomic<T*> made_{nullptr};
};

}  // namespace shoal
