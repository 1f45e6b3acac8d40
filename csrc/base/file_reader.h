// Reads a file, most of it in ascending order: what comes next is read ahead by threads of its own, past the page cache
// where the file system can. Other reads, and those of files too small for it, go to the system one by one.
//
// Bytes that were there when it was opened must not change; those that are appended later are seen.
//
// Thread safety: every method may be called from any thread; they wait for each other. In a forked child nothing is read
// ahead, and it must not be destroyed: the threads are not there.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"

namespace shoal {

class FileReader {
 public:
  static Status open(const FilePath& path, bool direct, FileOwner owner, std::unique_ptr<FileReader>* reader);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // All of the bytes, or an error. A read is ascending if it begins where the last ended, or up to 4 MiB after it.
  Status read(int64_t offset, void* out, int64_t bytes);
  Status size(int64_t* bytes) const { return plain_.size(bytes); }
  void close();

  const std::string& path() const { return plain_.path(); }
  bool direct() const { return ahead_.direct(); }
  // Bytes that came from what was read ahead.
  int64_t bytes_from_ahead();

 private:
  // On huge pages one request to the disk; in pieces of 512 KiB, as on small pages, it gives less than half as much.
  static constexpr int64_t kChunkBytes = int64_t{4} << 20;
  // One that is being copied from, and three ahead.
  static constexpr int64_t kSlots = 4;
  // One is a tenth slower in the median (3.5 against 3.9 GiB/s), and varies more.
  static constexpr int kThreads = 2;
  // So many bytes in a row are worth a thread's start.
  static constexpr int64_t kRowBytes = int64_t{1} << 20;

  enum class State { idle, asked, reading, ready };
  struct Slot {
    int64_t chunk = -1;
    State state = State::idle;
    int64_t bytes = 0;  // fewer than a chunk at the file's end
    Status status;
  };

  FileReader(File plain, File ahead);

  // From `offset` on, chunks are read ahead; false where that is not worth it or not possible.
  Status begin(int64_t offset, bool* began);
  Status read_ahead(int64_t offset, char* out, int64_t bytes);
  // The window of chunks begins with this one.
  Status move_to(int64_t chunk);
  void read_in_background();
  void end_threads();

  Slot& slot(int64_t chunk) { return slots_[size_t(chunk % kSlots)]; }
  char* memory_of(int64_t chunk) const { return memory_ + chunk % kSlots * kChunkBytes; }

  File plain_, ahead_;  // `ahead_` is direct, or closed
  const pid_t maker_;

  std::mutex callers_;  // covers what is the caller's:
  char* memory_ = nullptr;
  bool is_ahead_ = false;
  int64_t ahead_end_ = 0;  // of the last read from what was read ahead
  int64_t first_ = -1;     // chunk that is copied from: the window's first
  int64_t plain_end_ = 0;  // of the last other read
  int64_t in_a_row_ = 0;   // bytes of ascending reads that ended with it
  int64_t from_ahead_ = 0;
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // covers all below
  std::condition_variable wake_, ready_;
  std::array<Slot, kSlots> slots_;
  bool ends_ = false;
};

}  // namespace shoal
