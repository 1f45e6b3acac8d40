// The one door to the file system. What it cannot do it says with the file's name and what to do about it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/faults.h"
#include "base/status.h"

namespace shoal {

// Direct reads and writes begin at multiples of it, in memory and in the file, and have multiples of it as length.
inline constexpr int64_t kBlockBytes = 4096;

// "[file PATH] WHAT: the system's words (errno). What to do."
Status file_failed(const std::string& path, const std::string& what, int error);

class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File() { close(); }

  // A new file for reading and writing, past the page cache where the file system can (`direct()` says so).
  static Status create(const std::string& path, bool direct, File* file);

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }
  bool is_open() const { return descriptor_ >= 0; }

  // All of the bytes, or an error.
  Status read(void* to, int64_t bytes, int64_t offset) const;
  Status write(const void* from, int64_t bytes, int64_t offset) const;
  // What was written is on the disk.
  Status sync() const;
  void close();

  // The answer to a read or write that moved so many bytes, an errno if it is negative.
  Status answer(FileCall call, int64_t moved, int64_t bytes, int64_t offset) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
};

// A directory that one process has to itself.
class OwnedDirectory {
 public:
  OwnedDirectory() = default;
  OwnedDirectory(OwnedDirectory&& other) noexcept { *this = std::move(other); }
  OwnedDirectory& operator=(OwnedDirectory&& other) noexcept;
  ~OwnedDirectory() { release(); }

  // Makes it, with those above it, and takes it; where another process has it, the error names that one. Files that a
  // dead owner left are removed.
  static Status take(const std::string& path, OwnedDirectory* directory);
  // Removes what is in it, and the directory.
  void release();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;
};

Status remove_file(const std::string& path);

}  // namespace shoal
