#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/io.h"

namespace shoal {

namespace {

class IoThreads : public Io {
 public:
  explicit IoThreads(int depth) : Io(depth) {}

  ~IoThreads() override {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::string name() const override { return "threads"; }

  std::unique_ptr<PendingIo> start(std::vector<IoRequest>* requests) override {
    auto pending = std::make_unique<Call>(this, requests);
    if (requests->empty()) return pending;
    std::lock_guard lock(mutex_);
    start_threads(requests->size());
    calls_.push_back(pending.get());
    wake_.notify_all();
    return pending;
  }

 private:
  struct Call : PendingIo {
    Call(IoThreads* owner, std::vector<IoRequest>* requests)
        : owner(owner), requests(requests), open(requests->size()) {}
    ~Call() override { wait(); }

    void wait() override {
      std::unique_lock lock(owner->mutex_);
      // Where the system has no thread to give, the caller makes the requests.
      while (owner->threads_.empty() && open > 0) owner->make_next(&lock);
      done.wait(lock, [this] { return open == 0; });
    }

    IoThreads* owner;
    std::vector<IoRequest>* requests;
    size_t next = 0;  // that nobody has begun
    size_t open;      // that are not answered
    std::condition_variable done;
  };

  void start_threads(size_t wanted) {
    while (threads_.size() < std::min(wanted, size_t(depth()))) {
      try {
        threads_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {
        return;  // fewer will do
      }
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return ends_ || !calls_.empty(); });
      if (calls_.empty()) return;
      make_next(&lock);
    }
  }

  // Makes a request of the oldest call. REQUIRES: there is one.
  void make_next(std::unique_lock<std::mutex>* lock) {
    Call* call = calls_.front();
    IoRequest* request = &(*call->requests)[call->next++];
    if (call->next == call->requests->size()) calls_.pop_front();
    lock->unlock();
    make(request);
    lock->lock();
    if (--call->open == 0) call->done.notify_all();
  }

  static void make(IoRequest* request) {
    request->moved = 0;
    const File& file = *request->file;
    if (const int error = Faults::instance().check(request->call, file.path())) {
      request->moved = -error;
      return;
    }
    while (request->moved < request->bytes) {
      char* const at = request->memory + request->moved;
      const size_t left = size_t(request->bytes - request->moved);
      const int64_t offset = request->offset + request->moved;
      const ssize_t moved = request->call == FileCall::read ? ::pread(file.descriptor(), at, left, offset)
                                                            : ::pwrite(file.descriptor(), at, left, offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) request->moved = -errno;
      if (moved <= 0) return;
      request->moved += moved;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  std::deque<Call*> calls_;  // with requests that nobody has begun
  bool ends_ = false;
};

}  // namespace

std::unique_ptr<Io> make_io_threads(int depth) { return std::make_unique<IoThreads>(depth); }

}  // namespace shoal
