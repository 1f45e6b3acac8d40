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

  std::unique_ptr<IoQueue> queue() override { return std::make_unique<Queue>(this); }

 private:
  class Queue : public IoQueue {
   public:
    explicit Queue(IoThreads* owner) : owner_(owner) {}
    ~Queue() override {
      while (next() != nullptr) {
      }
    }

    void ask(IoRequest* request) override { asked_.push_back(request); }

    void begin() override {
      if (asked_.empty()) return;
      std::lock_guard lock(owner_->mutex_);
      for (IoRequest* request : asked_) owner_->tasks_.push_back({this, request});
      open_ += asked_.size();
      asked_.clear();
      owner_->start_threads(open_);
      owner_->wake_.notify_all();
    }

    IoRequest* next() override {
      begin();
      std::unique_lock lock(owner_->mutex_);
      if (open_ == 0) return nullptr;
      // Where the system has no thread to give, the caller makes the requests.
      while (owner_->threads_.empty() && answered_.empty()) owner_->make_next(&lock);
      some_.wait(lock, [this] { return !answered_.empty(); });
      IoRequest* const request = answered_.front();
      answered_.pop_front();
      --open_;
      return request;
    }

    // REQUIRES: the owner's mutex is held.
    void answer(IoRequest* request) {
      answered_.push_back(request);
      some_.notify_one();
    }

   private:
    IoThreads* const owner_;
    std::vector<IoRequest*> asked_;
    // Under the owner's mutex:
    size_t open_ = 0;  // that next() has not told of
    std::deque<IoRequest*> answered_;
    std::condition_variable some_;
  };
  struct Task {
    Queue* queue;
    IoRequest* request;
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
      wake_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      make_next(&lock);
    }
  }

  // Makes the oldest request. REQUIRES: there is one.
  void make_next(std::unique_lock<std::mutex>* lock) {
    const Task task = tasks_.front();
    tasks_.pop_front();
    lock->unlock();
    make(task.request);
    lock->lock();
    task.queue->answer(task.request);
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
  std::deque<Task> tasks_;  // that no thread has begun
  bool ends_ = false;
};

}  // namespace

std::unique_ptr<Io> make_io_threads(int depth) { return std::make_unique<IoThreads>(depth); }

}  // namespace shoal
