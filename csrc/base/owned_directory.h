// A directory that one process has to itself.
//
// Thread safety: one thread at a time for each directory; several directories may be used concurrently.
#pragma once

#include <string>
#include <utility>

#include "base/file_lock.h"

namespace shoal {

class OwnedDirectory {
 public:
  OwnedDirectory() = default;
  OwnedDirectory(OwnedDirectory&& other) noexcept { *this = std::move(other); }
  OwnedDirectory& operator=(OwnedDirectory&& other) noexcept;
  ~OwnedDirectory() { release(); }

  // Makes it, with those above it, and takes it; where another process has it, the error names that one. Files that a
  // dead owner left are removed.
  static Status take(const FilePath& path, OwnedDirectory* directory);
  // Removes what is in it, the directory, and the one above it if it was made for such a one and is empty now. Nothing in a forked child, whose directory it is not.
  void release();

  const std::string& path() const { return path_.string(); }
  const FilePath& place() const { return path_; }

 private:
  FilePath path_{""};
  FileLock lock_;
};

}  // namespace shoal
