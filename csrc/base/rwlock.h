// A shared/exclusive lock that prefers a waiting exclusive caller to new shared ones, so that eval traffic cannot
// starve training.
#pragma once

#include <pthread.h>

namespace shoal {

class RwLock {
 public:
  RwLock() {
    pthread_rwlockattr_t attr;
    pthread_rwlockattr_init(&attr);
#if defined(__GLIBC__)
    pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&lock_, &attr);
    pthread_rwlockattr_destroy(&attr);
  }
  ~RwLock() { pthread_rwlock_destroy(&lock_); }
  RwLock(const RwLock&) = delete;
  RwLock& operator=(const RwLock&) = delete;

  // Returns false if this thread holds the exclusive lock already, and would wait for itself.
  [[nodiscard]] bool enter(bool exclusive) {
    return (exclusive ? pthread_rwlock_wrlock(&lock_) : pthread_rwlock_rdlock(&lock_)) == 0;
  }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void lock() { pthread_rwlock_wrlock(&lock_); }
  // Both end either kind, on the thread that began it.
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void unlock_shared() { unlock(); }

 private:
  pthread_rwlock_t lock_;
};

}  // namespace shoal
