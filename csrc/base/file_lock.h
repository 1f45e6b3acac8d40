// A file that one process at a time has locked, with that one's number and what it has it for: "4711 log". It ends with
// its process, however that ends; the file stays.
//
// Thread safety: for one thread at a time.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>

#include "base/file.h"

namespace shoal {

class FileLock {
 public:
  FileLock() = default;
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock() { release(); }

  // Makes the file if there is none. `word`, of letters, says what it is for, if it is not empty. If the lock is held,
  // even by this process, the error names the process; with `wait` the call waits until it is free.
  static Status take(const FilePath& path, const std::string& word, FileOwner owner, FileLock* lock, bool wait = false);
  void release();

  const std::string& path() const { return file_.path(); }
  // Not in a forked child, to whom it does not pass.
  bool is_held() const;
  // Held, and the path still leads to the file that is locked: otherwise another process may have locked another one.
  bool is_in_place() const;

 private:
  File file_;
  pid_t holder_ = 0;
  bool is_locked_ = false;
};

}  // namespace shoal
