// Rows on disk, by key. Writes append to segments, files of one size; a row is one read of its block. What is overwritten or
// erased stays behind as garbage until its segment is collected: rows that live are appended anew, and the file is
// removed. A segment is never written twice, so a read needs no lock once it knows where its row is.
//
// It is a tier and no database: it ends with the process.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/io.h"
#include "base/owned_directory.h"
#include "store/block.h"
#include "store/slots.h"

namespace shoal {

struct SsdStats {
  int64_t rows = 0;
  int64_t capacity = 0;     // rows
  int64_t file_bytes = 0;   // of segments that there are
  int64_t index_bytes = 0;  // of memory
  int64_t reads = 0;        // blocks
  int64_t read_bytes = 0;
  int64_t written_rows = 0;
  int64_t written_bytes = 0;
  int64_t collected_rows = 0;  // written once more, to free their segment
  int64_t collected_bytes = 0;
  int64_t damaged = 0;  // blocks that were not what they should be
  int64_t read_calls = 0;
  int64_t read_nanoseconds = 0;
  int64_t write_nanoseconds = 0;
};

struct SsdOptions {
  std::string directory;
  int64_t row_bytes = 0;
  int64_t max_bytes = 0;  // of all files
  bool direct = true;
  // The most that is collected in a second while nobody waits for it.
  int64_t collect_bytes_per_second = int64_t{64} << 20;
};

class SsdStore {
 public:
  // `io` may be shared by stores.
  static Status open(const SsdOptions& options, std::shared_ptr<Io> io, std::unique_ptr<SsdStore>* store);
  ~SsdStore();
  SsdStore(const SsdStore&) = delete;
  SsdStore& operator=(const SsdStore&) = delete;

  // The most rows it takes: half of what its files could hold, so that collecting a segment always frees some of it.
  int64_t capacity() const { return capacity_; }
  int64_t rows() const;

  // Rows of n keys, row_bytes each, in place of those that they had. Those on a failed write keep what they had; the
  // others are written. Where a key comes twice nothing is written.
  Status write(const int64_t* keys, const char* rows, int64_t n);

  // found[i]: whether key i has a row, which is then at rows + i * row_bytes. Where a block cannot be read or is damaged
  // the rows on it are not found, the others are, and the error names it.
  Status read(const int64_t* keys, char* rows, bool* found, int64_t n);
  // The same from several stores at a time.
  struct Read {
    SsdStore* store;
    const int64_t* keys;
    char* rows;
    bool* found;
    int64_t n;
    Status status = {};
  };
  static void read_together(std::vector<Read>* reads);

  void contains(const int64_t* keys, bool* found, int64_t n) const;
  // How many there were.
  int64_t erase(const int64_t* keys, int64_t n);
  std::vector<int64_t> keys() const;
  void clear();

  SsdStats stats() const;

 private:
  // Files of dead segments, to be written to once more: the file system has given them their place on the disk.
  struct Spares {
    std::mutex mutex;
    std::vector<File> files;
  };
  struct Segment {
    ~Segment();

    File file;
    std::shared_ptr<Spares> spares;  // where the file goes once nobody reads it
    uint64_t id = 0;
    int64_t blocks = 0;     // that were given out
    int64_t live = 0;       // rows
    int64_t under_way = 0;  // writes that are not answered
    bool stuck = false;     // has rows that cannot be read
    bool failed = false;    // a write to it did
  };
  // Blocks of one segment that one write fills with rows from `first` on.
  struct Extent {
    uint32_t place = 0;
    std::shared_ptr<Segment> segment;
    int64_t first_block = 0;
    int64_t blocks = 0;
    int64_t first = 0;
    int64_t rows = 0;
  };
  // Rows for a write: one behind the other, or each from its own place in memory.
  struct Source {
    const int64_t* keys;
    const char* rows;
    int64_t stride;
    const char* const* each;
    // Where a row must still be if it is to be replaced; null: wherever it is.
    const uint32_t* from;

    const char* row(int64_t i) const { return each == nullptr ? rows + i * stride : each[i]; }
  };
  struct Reading;
  struct Block;

  SsdStore(const SsdOptions& options, std::shared_ptr<Io> io, OwnedDirectory directory);

  int64_t segment_rows() const { return segment_blocks_ * layout_.rows_per_block; }
  uint32_t slot_of(uint32_t place, int64_t block, int64_t row) const {
    return uint32_t(place * segment_rows() + block * layout_.rows_per_block + row);
  }
  Status append(const Source& source, int64_t n, bool collecting);
  // The blocks of an extent, in memory.
  void fill(const Source& source, const Extent& extent, char* blocks) const;
  // Reads with one queue, in the caller's thread.
  static void read_here(Read* reads, size_t count);
  void begin_reading(Reading* reading) const;
  void end_reading(const Reading& reading, int64_t nanoseconds);
  // Asks for the block that is wanted next; and its rows to the caller.
  void ask(Reading* reading, Block* block) const;
  Status take(Reading* reading, const Block& block) const;
  // So many blocks at most; none where a segment would have to be freed for them and it may not wait for that.
  Status give_out(std::unique_lock<std::mutex>* lock, int64_t blocks, bool collecting, bool may_wait, Extent* extent);
  Status begin_segment();
  // What a write did: its rows are where it put them, if it was answered. `had` is room for where they were.
  Status settle(const Extent& extent, const Source& source, bool written, bool collecting, uint32_t* had);
  void leave(uint32_t slot);
  void drop_if_dead(uint32_t place);
  void drop(uint32_t place, bool keep_file);
  // The sealed segment with the fewest rows that live; -1 where none would free anything.
  int64_t choose() const;
  // Frees a segment, whose place others may take; false where none could be.
  bool collect_one(std::unique_lock<std::mutex>* lock, Status* status);
  Status move_rows(uint32_t place, const std::shared_ptr<Segment>& segment);
  void collect_in_background();
  int64_t free_places() const { return int64_t(free_.size()); }
  // `lost`: the keys that were asked for and are on it.
  Status damaged(const Segment& segment, int64_t block, const std::vector<int64_t>& lost) const;

  const SsdOptions options_;
  const BlockLayout layout_;
  const std::shared_ptr<Io> io_;
  OwnedDirectory directory_;
  const std::shared_ptr<Spares> spares_;
  int64_t segment_blocks_ = 0;
  int64_t capacity_ = 0;

  mutable std::mutex mutex_;  // covers all below
  std::condition_variable wake_, freed_;
  std::unique_ptr<SlotIndex> index_;
  std::vector<std::shared_ptr<Segment>> places_;  // null where there is none
  std::vector<uint32_t> free_;
  size_t spares_promised_ = 0;  // with those that are still being read
  int64_t active_ = -1;         // place that is written to
  bool collecting_ = false;
  uint64_t next_id_ = 1;
  SsdStats stats_;
  bool ends_ = false;
  std::thread collector_;
};

}  // namespace shoal
