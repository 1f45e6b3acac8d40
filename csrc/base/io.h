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

// Requests that are under way. They, their memory and their files must stay until each is answered.
class PendingIo {
 public:
  virtual ~PendingIo() = default;
  // Returns once each is answered; whoever lets it go waits too.
  virtual void wait() = 0;
};

// Safe to call from several threads.
class Io {
 public:
  virtual ~Io() = default;

  // Begins with all requests, at most depth() at a time, in any order.
  virtual std::unique_ptr<PendingIo> start(std::vector<IoRequest>* requests) = 0;
  void run(std::vector<IoRequest>* requests) { start(requests)->wait(); }
  virtual std::string name() const = 0;
  int depth() const { return depth_; }

 protected:
  explicit Io(int depth) : depth_(depth) {}

 private:
  int depth_;
};

// By the kernel's io_uring; null where it is not allowed.
std::unique_ptr<Io> make_uring(int depth);
// By threads that wait for a request each.
std::unique_ptr<Io> make_io_threads(int depth);
// The first that there is.
std::unique_ptr<Io> make_io(int depth);

}  // namespace shoal
