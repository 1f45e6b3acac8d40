// Many reads and writes at a time. A disk answers one request in about the time that it answers a hundred.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/file.h"

namespace shoal {

struct IoRequest {
  FileCall call = FileCall::read;  // or write
  const File* file = nullptr;
  char* memory = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  int64_t moved = 0;  // bytes, or an errno as a negative number

  Status status() const { return file->answer(call, moved, bytes, offset); }
};

// The requests of one caller, for one thread at a time.
class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  // Returns once each request is answered.
  virtual ~IoQueue() = default;

  // The request, its memory and its file must stay until it is answered.
  virtual void ask(IoRequest* request) = 0;
  // Begins with what was asked for, at most depth() requests at a time, in any order.
  virtual void begin() = 0;
  // One that is answered, which may be asked for again; null once all are. Begins with what was asked for.
  virtual IoRequest* next() = 0;
};

// Safe to call from several threads.
class Io {
 public:
  virtual ~Io() = default;

  virtual std::unique_ptr<IoQueue> queue() = 0;
  // Makes all requests.
  void run(std::vector<IoRequest>* requests) {
    const std::unique_ptr<IoQueue> made = queue();
    for (IoRequest& request : *requests) made->ask(&request);
    while (made->next() != nullptr) {
    }
  }
  virtual std::string name() const = 0;
  int depth() const { return depth_; }

 protected:
  explicit Io(int depth) : depth_(depth) {}

 private:
  int depth_;
};

// By the kernel's io_uring; null where it is not allowed. A queue that gets no ring of its own, as where too many files are
// open, or loses it, is served by threads.
std::unique_ptr<Io> make_uring(int depth);
// By threads that wait for a request each.
std::unique_ptr<Io> make_io_threads(int depth);
// The first that there is.
std::unique_ptr<Io> make_io(int depth);

}  // namespace shoal
