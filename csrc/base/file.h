// The one door to the file system. What it cannot do it says with the file's name and what to do about it.
//
// Below the root of a path no link is followed, by any call: each is made on the last name of the path, in its folder that
// is held open. Only regular files are opened, so that no call waits for a pipe or has a device do something.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/faults.h"
#include "base/file_path.h"
#include "base/status.h"

namespace shoal {

// Direct reads and writes begin at multiples of it, in memory and in the file, and have multiples of it as length.
inline constexpr int64_t kBlockBytes = 4096;

// Whose file it is: what to do about a failure differs.
enum class FileOwner { ssd, log };

// "[file PATH] WHAT: the system's words (errno). What to do."
Status file_failed(FileOwner owner, const FilePath& path, const std::string& what, int error);

// Thread safety: any threads may make calls concurrently, but none during close() or a move.
class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File() { close(); }

  // Reads and writes go past the page cache where `direct` asks for it and the file system can (`direct()` says so).
  // For reading and writing: in place of one that was there; only if there is none; as it is, made if there is none.
  static Status create(const FilePath& path, bool direct, File* file, FileOwner owner = FileOwner::ssd);
  static Status create_new(const FilePath& path, bool direct, FileOwner owner, File* file);
  static Status open_to_write(const FilePath& path, bool direct, FileOwner owner, File* file);
  // For reading.
  static Status open_to_read(const FilePath& path, bool direct, FileOwner owner, File* file);

  const std::string& path() const { return path_.string(); }
  const FilePath& place() const { return path_; }
  FileOwner owner() const { return owner_; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }
  bool is_open() const { return descriptor_ >= 0; }

  // All of the bytes, or an error.
  Status read(void* to, int64_t bytes, int64_t offset) const;
  Status write(const void* from, int64_t bytes, int64_t offset) const;
  // As many of the bytes as there are before the file's end.
  Status read_some(void* to, int64_t bytes, int64_t offset, int64_t* moved) const;
  Status size(int64_t* bytes) const;
  // The first place from `offset` on that was written to; the file's end where there is none. What lies between is a hole,
  // which reads as zeros.
  Status next_data(int64_t offset, int64_t* at) const;
  // What it grows by reads as zeros.
  Status truncate(int64_t bytes) const;
  // What was written is on the disk.
  Status sync() const;
  void close();
  // The descriptor, which is the caller's to close from now on.
  int detach() { return std::exchange(descriptor_, -1); }
  // Whether its path still leads to this file.
  bool is_in_place() const;
  bool is_same(const File& other) const;

  // The answer to a read or write that moved so many bytes, an errno if it is negative.
  Status answer(FileCall call, int64_t moved, int64_t bytes, int64_t offset) const;

 private:
  static Status open(const FilePath& path, int flags, bool direct, FileOwner owner, const char* failed, File* file);
  // Less than all of the bytes at the file's end only; an errno if it is negative.
  int64_t read_until_end(void* to, int64_t bytes, int64_t offset) const;

  FilePath path_{""};
  FileOwner owner_ = FileOwner::ssd;
  int descriptor_ = -1;
  bool direct_ = false;
};

// No error where there is none. A link is removed itself.
Status remove_file(const FilePath& path, FileOwner owner = FileOwner::ssd);
// One that is empty; no error where there is none.
Status remove_directory(const FilePath& path, FileOwner owner);
// In place of what is called `to`. Durable once its directory is synced.
Status rename_file(const FilePath& from, const FilePath& to, FileOwner owner);
// One more name for a file; `made` is false where the file system gives a file no second one.
Status link_file(const FilePath& path, const FilePath& to, FileOwner owner, bool* made);
// Names that were given and taken in it are on the disk.
Status sync_directory(const FilePath& path, FileOwner owner);
// With the directories above it. If `durable`, the names of those that were made are on the disk.
Status make_directories(const FilePath& path, FileOwner owner, bool durable = true);
// What is in it, by name.
Status list_directory(const FilePath& path, FileOwner owner, std::vector<std::string>* names);
// Nothing where there is no file; an error where something else is there.
Status file_size(const FilePath& path, FileOwner owner, std::optional<int64_t>* bytes);

// What a name stands for.
struct FileEntry {
  FileKind kind;
  uint32_t owner;      // the user's number
  int64_t disk_bytes;  // that it has there: holes have none
};
// Nothing where there is none. Below a path's root, of a link itself.
Status look_at(const FilePath& path, FileOwner owner, std::optional<FileEntry>* entry);

}  // namespace shoal
