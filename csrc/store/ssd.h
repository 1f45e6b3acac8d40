// Rows on disk, by key. Writes append to segments, files of one size; a row is one read of its block. Overwritten and
// erased rows stay on disk as garbage until their segment is collected: its live rows are appended again, and the file
// is removed. A block that had a row is never written twice, so a read needs no lock once it knows where its row is.
//
// It is a tier, not a database: it ends with the process.
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
  int64_t file_bytes = 0;   // that its files have
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
  FilePath directory{""};
  int64_t row_bytes = 0;
  int64_t max_bytes = 0;  // of all files
  bool direct = true;
  // The most that is collected in a second while no write waits for it.
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

  // Writes the rows of n keys, row_bytes each, in place of the rows that they had. Keys of a failed write keep their
  // old rows; the others are written. If a key comes twice, nothing is written.
  Status write(const int64_t* keys, const char* rows, int64_t n);

  // found[i]: whether key i has a row, which is then at rows + i * row_bytes. If blocks cannot be read or are damaged,
  // the rows on them are not found, and all others are. The error names the files, and `lost` are all such keys, in
  // ascending order; it is empty if the system had no memory or threads to ask the disk.
  Status read(const int64_t* keys, char* rows, bool* found, int64_t n, std::vector<int64_t>* lost = nullptr);
  // The same from several stores at a time. The status of each says if there was no memory or thread for it.
  struct Read {
    SsdStore* store;
    const int64_t* keys;
    char* rows;
    bool* found;
    int64_t n;
    Status status = {};
    std::vector<int64_t> lost = {};
  };
  static void read_together(std::vector<Read>* reads);

  void contains(const int64_t* keys, bool* found, int64_t n) const;
  // Returns how many there were.
  int64_t erase(const int64_t* keys, int64_t n);
  std::vector<int64_t> keys() const;
  void clear();

  SsdStats stats() const;

 private:
  // Files of dead segments, kept for new segments: the file system has given them their place on the disk.
  struct Spares {
    std::mutex mutex;
    std::vector<File> files;
  };
  // Consecutive blocks of a segment.
  struct Blocks {
    int64_t first = 0;
    int64_t count = 0;
  };
  struct Segment {
    ~Segment();
    int64_t hole_blocks() const;

    File file;
    std::shared_ptr<Spares> spares;  // where the file goes once no thread reads it
    uint64_t id = 0;
    int64_t blocks = 0;     // that were given out
    int64_t live = 0;       // rows
    int64_t under_way = 0;  // writes that are not answered
    int64_t need = 0;       // blocks that collecting it takes, at most, with those it took already left out
    // Of writes that failed: no row was ever there, so they are never read, and can be written again.
    std::vector<Blocks> holes = {};
    bool stuck = false;   // has rows that cannot be read
    bool failed = false;  // a write to it failed
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
  // Rows for a write: one after the other, or each at its own place in memory.
  struct Source {
    const int64_t* keys;
    const char* rows;
    int64_t stride;
    const char* const* each;
    // The slot that a row must still have to be replaced; null: any slot.
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
  // Requests the next wanted block; and copies its rows to the caller.
  void ask(Reading* reading, Block* block) const;
  void take(Reading* reading, const Block& block) const;
  // Of a read that did not return what was written there.
  static void note_failure(Reading* reading, const IoRequest& answered);
  // The status of a call that could not read some rows.
  static void tell_of_lost(const Reading& reading);
  // At most so many blocks; none if a segment would have to be freed for them and the call may not wait for that.
  Status give_out(std::unique_lock<std::mutex>* lock, int64_t blocks, bool collecting, bool may_wait, Extent* extent);
  void take_blocks(uint32_t place, Blocks blocks, Extent* extent);
  // Blocks of a write that failed; false if there are none.
  bool take_hole(int64_t blocks, Extent* extent);
  Status begin_segment(bool collecting);
  // Settles a write: if it succeeded, its rows are where it put them. `had` is room for where they were before.
  Status settle(const Extent& extent, const Source& source, bool written, bool collecting, uint32_t* had);
  void leave(uint32_t slot);
  Status drop_if_dead(uint32_t place);
  Status drop(uint32_t place, bool keep_file);
  bool is_written_to(uint32_t place) const;
  // Blocks that collecting may write to, but for those in stuck segments.
  int64_t room() const;
  int64_t need_of(const Segment& segment) const;
  // Returns the sealed segment with the fewest live rows among those that there is room for; -1 if none would free
  // anything.
  int64_t choose() const;
  // Frees a segment, whose place others may take; false if it could not be freed.
  bool collect(std::unique_lock<std::mutex>* lock, uint32_t place, Status* status);
  Status move_rows(uint32_t place, const std::shared_ptr<Segment>& segment);
  // The blocks of a request that failed, each by itself, as far as they can be read; false where it gave up.
  bool read_each(const IoRequest& failed, std::vector<IoRequest>* read) const;
  // Lets stuck segments be tried again; false if there are none.
  bool retry_stuck();
  Status nothing_freed() const;
  void collect_in_background();
  int64_t free_places() const { return int64_t(free_.size()); }

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
  size_t spares_promised_ = 0;          // with those that are still being read
  int64_t active_[2] = {-1, -1};        // places that are written to: by writers, and by collection
  int64_t under_way_ = 0;               // writes that are not answered
  int64_t settled_ = 0;                 // writes that were answered
  std::shared_ptr<Segment> collected_;  // the one that is being collected
  uint64_t next_id_ = 1;
  SsdStats stats_;
  bool ends_ = false;
  std::thread collector_;
};

}  // namespace shoal
