// Faults that tests put between the core and the operating system: the next calls of a kind, on files whose path has a
// certain part, answer with an error of the test's choice.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace shoal {

enum class FileCall { open, read, write, sync, remove };

struct Fault {
  FileCall call;
  std::string path_part;
  int error;      // an errno
  int64_t after;  // calls that are let through first
  int64_t times;  // then so many answer with it
};

class Faults {
 public:
  static Faults& instance();

  void inject(Fault fault);
  void clear();

  // The errno that this call answers with, 0 if it is to be made.
  int check(FileCall call, const std::string& path) {
    return active_.load(std::memory_order_relaxed) ? look(call, path) : 0;
  }

 private:
  int look(FileCall call, const std::string& path);

  std::atomic<bool> active_{false};
  std::mutex mutex_;
  std::vector<Fault> faults_;
};

}  // namespace shoal
