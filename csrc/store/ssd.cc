#include "store/ssd.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <new>
#include <utility>

#include "base/hash.h"
#include "base/memory.h"
#include "base/thread_pool.h"

namespace shoal {

namespace {

constexpr int64_t kWriteBytes = int64_t{2} << 20;  // of one request; 1 MiB is 8 % slower, 256 KiB 60 %
constexpr int64_t kWrites = 4;                     // requests of one call that are under way at a time
constexpr int64_t kReadBytes = int64_t{2} << 20;   // of the blocks that are being read at a time
// Rows of several stores that one thread reads: waking others, on cores that are busy, takes longer.
constexpr int64_t kFewRows = 1024;
constexpr int64_t kMoveBytes = int64_t{4} << 20;  // that are read to be collected, at a time
constexpr int64_t kMostSegmentBytes = int64_t{64} << 20;
constexpr int64_t kSegments = 64;       // of a store that is not small
constexpr int64_t kLeastBlocks = 4;     // of a segment
constexpr int64_t kLeastSegments = 12;  // fewer leave too little to collect
constexpr int64_t kReserved = 2;        // places that only who collects may take; one would do, if all could be read
constexpr size_t kSpares = kReserved;   // dead files that are kept: for places that are free, so all fit into the size
constexpr size_t kNamedKeys = 10;       // of those that an error is about
constexpr int kThreads = 2;             // that fill blocks: two are faster than a disk

// Memory that can be read into and written from past the page cache: whole pages, kept from call to call.
class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t bytes) : at_(static_cast<char*>(Buffers::instance().acquire(size_t(bytes)))) {
    if (at_ == nullptr) throw std::bad_alloc();
  }
  ~AlignedMemory() { Buffers::instance().release(at_); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  char* get() const { return at_; }

 private:
  char* at_;
};

int64_t nanoseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
}

bool all_different(const int64_t* keys, int64_t n) {
  // Those in ascending order, as torch.unique gives them, are.
  if (std::is_sorted(keys, keys + n, std::less_equal<>())) return true;
  uint64_t room = 16;  // of a set of their numbers, at most half full
  while (room < 2 * uint64_t(n)) room *= 2;
  const Kept<uint32_t> set(room);
  constexpr uint32_t kNone = ~uint32_t{0};
  std::fill(set.get(), set.get() + room, kNone);
  for (int64_t i = 0; i < n; ++i) {
    uint64_t at = mix64(uint64_t(keys[i])) & (room - 1);
    for (; set.get()[at] != kNone; at = (at + 1) & (room - 1))
      if (keys[set.get()[at]] == keys[i]) return false;
    set.get()[at] = uint32_t(i);
  }
  return true;
}

int64_t blocks_in_round(const BlockLayout& layout) { return std::max<int64_t>(kMoveBytes / layout.block_bytes, 1); }

// Whether a request failed since the system had nothing to make it with: the disk was not asked.
bool was_not_made(const IoRequest& answered) {
  return answered.moved == -ENOMEM || answered.moved == -EMFILE || answered.moved == -ENFILE ||
         answered.moved == -EAGAIN;
}

void keep_first(Status* first, Status other) {
  if (first->ok()) *first = std::move(other);
}

}  // namespace

Status SsdStore::open(const SsdOptions& options, std::shared_ptr<Io> io, std::unique_ptr<SsdStore>* store) {
  const BlockLayout layout = BlockLayout::of(options.row_bytes);
  const int64_t least = kLeastSegments * kLeastBlocks * layout.block_bytes;
  if (options.max_bytes < least) {
    return {Code::storage, "[file " + options.directory + "] rows of " + std::to_string(options.row_bytes) +
                               " bytes need a store of " + std::to_string(least) + " bytes at least; got " +
                               std::to_string(options.max_bytes) + ". Raise Ssd(size=)."};
  }
  OwnedDirectory directory;
  if (Status status = OwnedDirectory::take(options.directory, &directory); !status.ok()) return status;
  store->reset(new SsdStore(options, std::move(io), std::move(directory)));
  return {};
}

SsdStore::SsdStore(const SsdOptions& options, std::shared_ptr<Io> io, OwnedDirectory directory)
    : options_(options),
      layout_(BlockLayout::of(options.row_bytes)),
      io_(std::move(io)),
      directory_(std::move(directory)),
      spares_(std::make_shared<Spares>()),
      index_(std::make_unique<SlotIndex>()) {
  spares_->files.reserve(kSpares);
  const int64_t wanted = std::min(options.max_bytes / kSegments, kMostSegmentBytes) / layout_.block_bytes;
  segment_blocks_ = std::max(wanted, kLeastBlocks);
  int64_t segments = options.max_bytes / (segment_blocks_ * layout_.block_bytes);
  segments = std::min<int64_t>(segments, int64_t{kNoSlot} / segment_rows());
  capacity_ = segments * segment_rows() / 2;
  places_.resize(size_t(segments));
  for (int64_t place = segments - 1; place >= 0; --place) free_.push_back(uint32_t(place));
  collector_ = std::thread([this] { collect_in_background(); });
}

SsdStore::~SsdStore() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  collector_.join();
}

int64_t SsdStore::rows() const {
  std::lock_guard lock(mutex_);
  return index_->size();
}

// ---- writing

Status SsdStore::write(const int64_t* keys, const char* rows, int64_t n) {
  const auto begin = std::chrono::steady_clock::now();
  if (!all_different(keys, n))
    return {Code::input, "[ssd " + directory_.path() + "] keys must all be different; some come twice."};
  Status status = append({keys, rows, layout_.row_bytes, nullptr, nullptr}, n, false);
  {
    std::lock_guard lock(mutex_);
    stats_.write_nanoseconds += nanoseconds_since(begin);
  }
  wake_.notify_one();
  return status;
}

Status SsdStore::append(const Source& source, int64_t n, bool collecting) {
  const int64_t all_blocks = (n + layout_.rows_per_block - 1) / layout_.rows_per_block;
  if (n == 0) return {};
  const int64_t most_blocks = std::min(std::max<int64_t>(kWriteBytes / layout_.block_bytes, 1), all_blocks);
  const size_t count = size_t(std::min((all_blocks + most_blocks - 1) / most_blocks, kWrites));
  std::vector<Extent> extents(count);
  std::vector<IoRequest> requests(count);
  std::vector<uint32_t> had(size_t(most_blocks * layout_.rows_per_block));
  std::vector<size_t> idle;
  for (size_t number = 0; number < count; ++number) idle.push_back(number);
  const AlignedMemory memory(int64_t(count) * most_blocks * layout_.block_bytes);
  std::unique_ptr<IoQueue> queue = io_->queue();  // goes before what it uses
  Status status;
  int64_t done = 0;
  try {
    while (true) {
      if (done < n && status.ok() && !idle.empty()) {
        const size_t number = idle.back();
        Extent& extent = extents[number];
        {
          const int64_t left = (n - done + layout_.rows_per_block - 1) / layout_.rows_per_block;
          std::unique_lock lock(mutex_);
          // What is under way keeps its segments from being freed: it must be settled before this waits for one.
          status = give_out(&lock, std::min(left, most_blocks), collecting, idle.size() == count, &extent);
        }
        if (extent.blocks > 0) {
          idle.pop_back();
          extent.first = done;
          extent.rows = std::min(extent.blocks * layout_.rows_per_block, n - done);
          done += extent.rows;
          char* const blocks = memory.get() + int64_t(number) * most_blocks * layout_.block_bytes;
          fill(source, extent, blocks);
          requests[number] = {FileCall::write, &extent.segment->file, blocks, extent.blocks * layout_.block_bytes,
                              extent.first_block * layout_.block_bytes};
          queue->ask(&requests[number]);
          queue->begin();
          continue;
        }
      }
      const IoRequest* const answered = queue->next();
      if (answered == nullptr && (done == n || !status.ok())) return status;
      if (answered == nullptr) continue;
      const size_t number = size_t(answered - requests.data());
      Status written = answered->status();
      keep_first(&status, settle(extents[number], source, written.ok(), collecting, had.data()));
      keep_first(&status, std::move(written));
      extents[number] = {};  // a dead one's file may be used again
      idle.push_back(number);
    }
  } catch (...) {
    // Segments that wait for an answer could never be freed.
    queue.reset();
    for (const Extent& extent : extents)
      if (extent.segment != nullptr) (void)settle(extent, source, false, collecting, had.data());
    throw;
  }
}

void SsdStore::fill(const Source& source, const Extent& extent, char* blocks) const {
  constexpr int64_t kBytesTogether = int64_t{128} << 10;  // enough to be worth a thread's wake
  const int64_t together = std::max<int64_t>(kBytesTogether / layout_.block_bytes, 1);
  const int64_t tasks = (extent.blocks + together - 1) / together;
  ThreadPool::instance().run(tasks, kThreads, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * together, extent.blocks);
    for (int64_t block = task * together; block < end; ++block) {
      char* const filled = blocks + block * layout_.block_bytes;
      const int64_t before = block * layout_.rows_per_block;
      const int64_t rows = std::min(layout_.rows_per_block, extent.rows - before);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t from = extent.first + before + row;
        layout_.put(filled, row, source.keys[from], source.row(from));
      }
      layout_.seal(filled, uint32_t(rows), extent.segment->id, uint64_t(extent.first_block + block));
    }
  });
}

Status SsdStore::give_out(std::unique_lock<std::mutex>* lock, int64_t blocks, bool collecting, bool may_wait,
                          Extent* extent) {
  bool retried = false;
  while (true) {
    if (const int64_t place = active_[collecting]; place >= 0 && places_[size_t(place)]->blocks < segment_blocks_) {
      Segment& segment = *places_[size_t(place)];
      const Blocks next{segment.blocks, std::min(blocks, segment_blocks_ - segment.blocks)};
      take_blocks(uint32_t(place), next, extent);
      segment.blocks += next.count;
      return {};
    }
    if (free_places() > (collecting ? 0 : kReserved)) {
      if (Status status = begin_segment(collecting); !status.ok()) return status;
      continue;
    }
    if (collecting && take_hole(blocks, extent)) return {};
    if (!may_wait) return {};
    if (!collecting && collected_ != nullptr) {
      freed_.wait(*lock, [this] { return collected_ == nullptr; });
      continue;
    }
    if (!collecting) {
      Status status;
      if (const int64_t place = choose(); place >= 0 && collect(lock, uint32_t(place), &status)) continue;
      if (!status.ok()) return status;
      // Segments that others write to cannot be freed yet. None of them waits for this one: what they have under way is
      // settled first.
      if (under_way_ > 0) {
        freed_.wait(*lock, [this, before = settled_] { return settled_ != before; });
        continue;
      }
    }
    // A disk may have been away for a while only.
    if (collecting || std::exchange(retried, true) || !retry_stuck()) return nothing_freed();
  }
}

void SsdStore::take_blocks(uint32_t place, Blocks blocks, Extent* extent) {
  const std::shared_ptr<Segment>& segment = places_[place];
  // So that an answer needs no memory.
  segment->holes.reserve(segment->holes.size() + size_t(segment->under_way) + 1);
  *extent = {place, segment, blocks.first, blocks.count};
  ++segment->under_way;
  ++under_way_;
}

bool SsdStore::take_hole(int64_t blocks, Extent* extent) {
  for (uint32_t place = 0; place < places_.size(); ++place) {
    Segment* const segment = places_[place].get();
    // What is moved within a segment would keep it from being freed.
    if (segment == nullptr || segment->holes.empty() || segment->stuck || segment == collected_.get()) continue;
    Blocks& hole = segment->holes.front();
    const Blocks taken{hole.first, std::min(blocks, hole.count)};
    take_blocks(place, taken, extent);
    Blocks& left = segment->holes.front();
    left = {left.first + taken.count, left.count - taken.count};
    if (left.count == 0) segment->holes.erase(segment->holes.begin());
    return true;
  }
  return false;
}

Status SsdStore::begin_segment(bool collecting) {
  auto segment = std::make_shared<Segment>();
  segment->id = next_id_++;
  segment->need = segment_blocks_;
  {
    std::lock_guard lock(spares_->mutex);
    if (!spares_->files.empty()) {
      segment->file = std::move(spares_->files.back());
      spares_->files.pop_back();
      --spares_promised_;
    }
  }
  if (!segment->file.is_open()) {
    const std::string path = directory_.path() + "/" + std::to_string(segment->id) + ".seg";
    if (Status status = File::create(path, options_.direct, &segment->file); !status.ok()) return status;
  }
  active_[collecting] = free_.back();
  free_.pop_back();
  places_[size_t(active_[collecting])] = std::move(segment);
  return {};
}

Status SsdStore::settle(const Extent& extent, const Source& source, bool written, bool collecting, uint32_t* had) {
  std::lock_guard lock(mutex_);
  Segment& segment = *extent.segment;
  --segment.under_way;
  --under_way_;
  ++settled_;
  freed_.notify_all();
  Status status;
  if (written) {
    const uint32_t first = slot_of(extent.place, extent.first_block, 0);
    const uint32_t* const from = source.from == nullptr ? nullptr : source.from + extent.first;
    status = index_->put(source.keys + extent.first, extent.rows, first, from, had);
    for (int64_t i = 0; i < extent.rows; ++i) {
      const uint32_t before = had[i];
      if (before == first + uint32_t(i)) continue;  // was not put
      ++segment.live;
      if (before != kNoSlot) leave(before);
    }
    const int64_t bytes = extent.blocks * layout_.block_bytes;
    stats_.written_bytes += collecting ? 0 : bytes;
    stats_.written_rows += collecting ? 0 : extent.rows;
    stats_.collected_bytes += collecting ? bytes : 0;
    stats_.collected_rows += collecting ? extent.rows : 0;
    if (collecting) collected_->need -= extent.blocks;
  } else {
    segment.holes.push_back({extent.first_block, extent.blocks});
    segment.failed = true;
  }
  (void)drop_if_dead(extent.place);
  return status;
}

void SsdStore::leave(uint32_t slot) {
  const uint32_t place = uint32_t(slot / segment_rows());
  // Where its file cannot be removed, who needs the place meets it.
  if (--places_[place]->live == 0) (void)drop_if_dead(place);
}

bool SsdStore::is_written_to(uint32_t place) const {
  const bool is_active = place == active_[false] || place == active_[true];
  return places_[place]->under_way > 0 || (is_active && places_[place]->blocks < segment_blocks_);
}

Status SsdStore::drop_if_dead(uint32_t place) {
  const Segment* const segment = places_[place].get();
  if (segment == nullptr || segment->live > 0 || is_written_to(place)) return {};
  // A row written anew could come to lie where who collects has read an old one of its key.
  if (segment == collected_.get()) return {};
  return drop(place, !segment->failed && !segment->stuck);
}

Status SsdStore::drop(uint32_t place, bool keep_file) {
  Segment& segment = *places_[place];
  // A file that cannot be removed keeps its place; the next collection tries again.
  if (keep_file && spares_promised_ < kSpares) {
    segment.spares = spares_;
    ++spares_promised_;
  } else if (Status status = remove_file(segment.file.path()); !status.ok()) {
    return status;
  }
  for (int64_t& active : active_)
    if (active == int64_t(place)) active = -1;
  places_[place].reset();
  free_.push_back(place);
  return {};
}

int64_t SsdStore::Segment::hole_blocks() const {
  int64_t blocks = 0;
  for (const Blocks& hole : holes) blocks += hole.count;
  return blocks;
}

SsdStore::Segment::~Segment() {
  if (spares == nullptr) return;
  std::lock_guard lock(spares->mutex);
  spares->files.push_back(std::move(file));
}

bool SsdStore::retry_stuck() {
  bool any = false;
  for (const auto& segment : places_)
    if (segment != nullptr) any |= std::exchange(segment->stuck, false);
  return any;
}

Status SsdStore::nothing_freed() const {
  int64_t stuck = 0;
  std::string path;
  for (const auto& segment : places_) {
    if (segment == nullptr || !segment->stuck) continue;
    ++stuck;
    path = segment->file.path();
  }
  std::string message = "[file " + directory_.path() + "] no segment can be freed: " + std::to_string(index_->size()) +
                        " rows live in files for " + std::to_string(2 * capacity_);
  if (stuck == 0) return {Code::storage, message + ". Raise Ssd(size=), or erase keys."};
  return {Code::storage, message + ", and " + std::to_string(stuck) + " of these, as " + path +
                             ", have rows that cannot be read. Look at the disk's health; `erase` the keys that reads "
                             "name as lost, or restore the table from a checkpoint."};
}

// ---- reading

// Rows that are wanted of one store, in the order of their blocks.
struct SsdStore::Reading {
  struct Wanted {
    uint32_t slot;
    int64_t at;  // of the caller's keys
  };
  Read* read;
  std::vector<Wanted> wanted = {};
  std::vector<std::shared_ptr<Segment>> held = {};  // by place
  size_t next = 0;                                  // that nobody asked for
  int64_t reads = 0, damages = 0;
};

// A block that is being read, and those of the wanted that are on it.
struct SsdStore::Block {
  IoRequest request;  // first: an answered request is its block's
  Reading* reading = nullptr;
  size_t begin = 0, end = 0;
};

Status SsdStore::read(const int64_t* keys, char* rows, bool* found, int64_t n) {
  Read read{this, keys, rows, found, n};
  read_here(&read, 1);
  return std::move(read.status);
}

void SsdStore::read_together(std::vector<Read>* reads) {
  int64_t rows = 0;
  for (const Read& read : *reads) rows += read.n;
  if (rows <= kFewRows) {
    if (!reads->empty()) read_here(reads->data(), reads->size());
    return;
  }
  std::atomic<size_t> next{0};
  // An exception that leaves a thread ends the process.
  const auto take_reads = [reads, &next]() noexcept {
    for (size_t i = next++; i < reads->size(); i = next++) {
      Read& read = (*reads)[i];
      try {
        read_here(&read, 1);
      } catch (const std::exception&) {  // no memory, or no thread to read in
        read.status = out_of_memory();
      }
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(reads->size() - 1);
    while (others.size() + 1 < reads->size()) others.emplace_back(take_reads);
  } catch (const std::exception&) {
    // Those that could be made, and this one, read it all.
  }
  take_reads();
  for (std::thread& other : others) other.join();
}

void SsdStore::read_here(Read* reads, size_t count) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Reading> readings;
  int64_t rows = 0, block_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    readings.push_back({&reads[i]});
    reads[i].store->begin_reading(&readings.back());
    rows += int64_t(readings.back().wanted.size());
    block_bytes = std::max(block_bytes, reads[i].store->layout_.block_bytes);
  }
  Io& io = *reads[0].store->io_;
  // More than the disk has in hand: those that wait take the place of answered ones while rows are copied.
  const int64_t most = std::clamp<int64_t>(kReadBytes / block_bytes, 1, 2 * io.depth());
  std::vector<Block> blocks(size_t(std::min(most, rows)));
  const AlignedMemory memory((std::min(most, rows) + 1) * block_bytes);
  size_t at = 0;
  const std::unique_ptr<IoQueue> queue = io.queue();  // goes before what it uses
  const auto ask_next = [&](Block* block) {
    while (at < count && readings[at].next == readings[at].wanted.size()) ++at;
    if (at == count) return;
    reads[at].store->ask(&readings[at], block);
    queue->ask(&block->request);
  };
  for (size_t number = 0; number < blocks.size(); ++number) {
    blocks[number].request.memory = memory.get() + int64_t(number) * block_bytes;
    ask_next(&blocks[number]);
  }
  // The rows of a block are copied while others are being read.
  while (IoRequest* answered = queue->next()) {
    Block& block = *reinterpret_cast<Block*>(answered);
    keep_first(&block.reading->read->status, block.reading->read->store->take(block.reading, block));
    ask_next(&block);
  }
  for (const Reading& reading : readings)
    reading.read->store->end_reading(reading, nanoseconds_since(begin) / int64_t(count));
}

void SsdStore::begin_reading(Reading* reading) const {
  const Read& read = *reading->read;
  reading->held.resize(places_.size());
  {
    std::vector<uint32_t> slots(static_cast<size_t>(read.n));
    std::lock_guard lock(mutex_);
    index_->find(read.keys, slots.data(), read.n);
    for (int64_t i = 0; i < read.n; ++i) {
      const uint32_t slot = slots[size_t(i)];
      read.found[i] = false;
      if (slot == kNoSlot) continue;
      reading->wanted.push_back({slot, i});
      const size_t place = size_t(slot / segment_rows());
      if (reading->held[place] == nullptr) reading->held[place] = places_[place];
    }
  }
  // Rows of one block beside each other.
  std::sort(reading->wanted.begin(), reading->wanted.end(),
            [](const auto& a, const auto& b) { return a.slot < b.slot; });
}

void SsdStore::end_reading(const Reading& reading, int64_t nanoseconds) {
  std::lock_guard lock(mutex_);
  stats_.reads += reading.reads;
  stats_.read_bytes += reading.reads * layout_.block_bytes;
  stats_.damaged += reading.damages;
  ++stats_.read_calls;
  stats_.read_nanoseconds += nanoseconds;
}

void SsdStore::ask(Reading* reading, Block* block) const {
  const std::vector<Reading::Wanted>& wanted = reading->wanted;
  const int64_t number = wanted[reading->next].slot / layout_.rows_per_block;
  size_t end = reading->next;
  while (end < wanted.size() && wanted[end].slot / layout_.rows_per_block == number) ++end;
  block->reading = reading;
  block->begin = reading->next;
  block->end = end;
  reading->next = end;
  ++reading->reads;
  block->request = {FileCall::read, &reading->held[size_t(number / segment_blocks_)]->file, block->request.memory,
                    layout_.block_bytes, number % segment_blocks_ * layout_.block_bytes};
}

Status SsdStore::take(Reading* reading, const Block& block) const {
  const IoRequest& answered = block.request;
  if (was_not_made(answered)) return answered.status();
  const Read& read = *reading->read;
  const Segment& segment = *reading->held[size_t(reading->wanted[block.begin].slot / segment_rows())];
  const int64_t number = answered.offset / layout_.block_bytes;
  const bool is_whole = answered.moved == answered.bytes;
  const int64_t there = is_whole ? layout_.rows_of(answered.memory, segment.id, uint64_t(number)) : -1;
  reading->damages += answered.moved >= 0 && there < 0;
  std::vector<int64_t> lost;
  for (size_t i = block.begin; i < block.end; ++i) {
    const auto [slot, to] = reading->wanted[i];
    const int64_t row = slot % layout_.rows_per_block;
    if (row >= there || layout_.key(answered.memory, row) != read.keys[to]) {
      lost.push_back(read.keys[to]);
      continue;
    }
    std::memcpy(read.rows + to * layout_.row_bytes, layout_.row(answered.memory, row), size_t(layout_.row_bytes));
    read.found[to] = true;
  }
  return lost.empty() ? Status() : cannot_be_read(answered, lost);
}

Status SsdStore::cannot_be_read(const IoRequest& answered, const std::vector<int64_t>& lost) {
  const std::string at = std::to_string(answered.offset);
  const std::string reading = "reading " + std::to_string(answered.bytes) + " bytes at " + at;
  std::string what = "the block at " + at + " is not what was written there: its checksum does not fit.";
  std::string then = "They are lost, others are not. ", health = "look at the disk's health.";
  if (answered.moved < 0) {
    const int error = int(-answered.moved);
    what = reading + " failed: " + std::strerror(error) + " (errno " + std::to_string(error) + ").";
    then = "Others are not concerned. Try again, if the disk may have been away for a moment; else ";
  } else if (answered.moved < answered.bytes) {
    what = reading + ": only " + std::to_string(answered.moved) + " are there. The file was cut.";
    health = "let nothing else write to that directory.";
  }
  std::string keys;
  for (size_t i = 0; i < std::min(lost.size(), kNamedKeys); ++i) keys += (i == 0 ? "" : ", ") + std::to_string(lost[i]);
  if (lost.size() > kNamedKeys) keys += " and " + std::to_string(lost.size() - kNamedKeys) + " more";
  return {Code::storage, "[file " + answered.file->path() + "] " + what +
                             " Of what was asked for, it had the rows of " + std::to_string(lost.size()) +
                             (lost.size() == 1 ? " key: " : " keys: ") + keys + ". " + then +
                             "`erase` these keys, which reads nothing (`assign` would), or restore the table from a "
                             "checkpoint, and " +
                             health};
}

void SsdStore::contains(const int64_t* keys, bool* found, int64_t n) const {
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  std::lock_guard lock(mutex_);
  index_->find(keys, slots.data(), n);
  for (int64_t i = 0; i < n; ++i) found[i] = slots[size_t(i)] != kNoSlot;
}

int64_t SsdStore::erase(const int64_t* keys, int64_t n) {
  std::lock_guard lock(mutex_);
  int64_t erased = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t slot = index_->erase(keys[i]);
    if (slot == kNoSlot) continue;
    leave(slot);
    ++erased;
  }
  return erased;
}

std::vector<int64_t> SsdStore::keys() const {
  std::lock_guard lock(mutex_);
  return index_->keys();
}

void SsdStore::clear() {
  std::unique_lock lock(mutex_);
  freed_.wait(lock, [this] { return collected_ == nullptr; });
  index_ = std::make_unique<SlotIndex>();
  active_[false] = active_[true] = -1;
  for (uint32_t place = 0; place < places_.size(); ++place) {
    if (places_[place] == nullptr) continue;
    places_[place]->live = 0;
    if (places_[place]->under_way == 0) (void)drop(place, false);
  }
  std::lock_guard others(spares_->mutex);
  spares_promised_ -= spares_->files.size();
  for (const File& file : spares_->files) (void)remove_file(file.path());  // nothing is on it
  spares_->files.clear();
}

SsdStats SsdStore::stats() const {
  SsdStats stats;
  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<std::vector<Blocks>> holes;
  {
    std::lock_guard lock(mutex_);
    stats = stats_;
    stats.rows = index_->size();
    stats.capacity = capacity_;
    stats.index_bytes = index_->bytes();
    for (const auto& segment : places_) {
      if (segment == nullptr) continue;
      segments.push_back(segment);
      holes.push_back(segment->holes);
    }
  }
  const auto size_of = [](const File& file) {
    int64_t bytes = 0;
    return file.size(&bytes).ok() ? bytes : 0;
  };
  for (size_t i = 0; i < segments.size(); ++i) {
    const int64_t bytes = size_of(segments[i]->file);
    stats.file_bytes += bytes;
    // A write that failed has left nothing, where a later one made the file longer.
    for (const auto [first, count] : holes[i])
      stats.file_bytes -= std::clamp<int64_t>(bytes - first * layout_.block_bytes, 0, count * layout_.block_bytes);
  }
  std::lock_guard lock(spares_->mutex);
  for (const File& file : spares_->files) stats.file_bytes += size_of(file);
  return stats;
}

// ---- collecting

// However many writes fail, and whichever: once they do not, a store that has no more rows than it takes, all of which can
// be read, can be written to. Let B be the blocks of a segment, and room() those that collecting may write to: of free
// places, behind the end of its active segment, and in holes. Then, whenever nothing is being collected,
//
//   room() >= B, or the segment whose collecting began last and did not end has need_of() <= room() without its own holes.
//
// - Writers take neither the collector's active segment nor a hole, and a free place only if kReserved stay: room() >= B.
// - Collecting begins only where need_of() <= room(), both without that segment's holes. A write of it that is answered
//   takes as much from the one as from the other: a round writes full blocks but for its last, so rows whose write failed
//   need no more blocks the next time than they did. One that fails gives its blocks back as holes, and takes nothing.
//   So it stays true until collecting ends; then a place is free, and room() >= B.
// - A segment that dies, or whose file cannot be removed, lessens neither.
//
// In either case there is one that choose() may take. And as long as a writer waits, some segment needs less than B: all
// but the reserved places and the collector's active one share rows for half of the places, so the emptiest of them is at
// most two thirds full even if there are but kLeastSegments. So each that is collected leaves a block more behind the end and in
// free places, until one of these is left for the writer.
int64_t SsdStore::room() const {
  int64_t blocks = free_places() * segment_blocks_;
  if (active_[true] >= 0) blocks += segment_blocks_ - places_[size_t(active_[true])]->blocks;
  for (const auto& segment : places_) blocks += segment == nullptr || segment->stuck ? 0 : segment->hole_blocks();
  return blocks;
}

int64_t SsdStore::need_of(const Segment& segment) const {
  // Each round of move_rows() may leave its last block almost empty.
  const int64_t in_block = layout_.rows_per_block, in_round = blocks_in_round(layout_);
  const int64_t rounds = (segment.blocks + in_round - 1) / in_round;
  return std::min({segment.need, segment.live, (segment.live + rounds * (in_block - 1)) / in_block});
}

int64_t SsdStore::choose() const {
  const int64_t room = this->room();
  int64_t chosen = -1;
  for (uint32_t place = 0; place < places_.size(); ++place) {
    const Segment* const segment = places_[place].get();
    if (segment == nullptr || is_written_to(place) || segment->stuck) continue;
    const int64_t need = need_of(*segment);
    if (need >= segment_blocks_ || need > room - segment->hole_blocks()) continue;
    if (chosen < 0 || segment->live < places_[size_t(chosen)]->live) chosen = place;
  }
  return chosen;
}

bool SsdStore::collect(std::unique_lock<std::mutex>* lock, uint32_t place, Status* status) {
  const std::shared_ptr<Segment> segment = places_[place];
  segment->need = need_of(*segment);
  collected_ = segment;
  Status moved;
  if (segment->live > 0) {
    lock->unlock();
    try {
      moved = move_rows(place, segment);
    } catch (const std::bad_alloc&) {
      moved = out_of_memory();
    }
    lock->lock();
  }
  collected_ = nullptr;
  if (places_[place] == segment) keep_first(&moved, drop_if_dead(place));
  const bool freed = places_[place] != segment;
  // What is left could not be read. Others still can be, so the file stays, and is left alone while others can be freed.
  segment->stuck = !freed && moved.ok();
  keep_first(status, std::move(moved));
  freed_.notify_all();
  return freed || segment->stuck;
}

Status SsdStore::move_rows(uint32_t place, const std::shared_ptr<Segment>& segment) {
  const int64_t in_request = std::max<int64_t>(kWriteBytes / layout_.block_bytes, 1);
  const int64_t in_round = blocks_in_round(layout_);
  AlignedMemory memory(std::min(in_round, segment->blocks) * layout_.block_bytes);
  bool gave_up = false;
  for (int64_t first = 0; first < segment->blocks; first += in_round) {
    const int64_t blocks = std::min(in_round, segment->blocks - first);
    std::vector<IoRequest> requests;
    for (int64_t at = 0; at < blocks; at += in_request) {
      requests.push_back({FileCall::read, &segment->file, memory.get() + at * layout_.block_bytes,
                          std::min(in_request, blocks - at) * layout_.block_bytes, (first + at) * layout_.block_bytes});
    }
    io_->run(&requests);
    for (const IoRequest& request : requests)
      if (was_not_made(request)) return request.status();
    std::vector<IoRequest> single;
    for (const IoRequest& request : requests) gave_up = gave_up || (request.moved < 0 && !read_each(request, &single));
    requests.insert(requests.end(), single.begin(), single.end());
    std::vector<int64_t> keys;
    std::vector<const char*> rows;
    std::vector<uint32_t> from;
    for (const IoRequest& request : requests) {
      // A write that failed may have left the file short: what is behind its end was never a row.
      for (int64_t at = 0; at + layout_.block_bytes <= request.moved; at += layout_.block_bytes) {
        const char* const block = request.memory + at;
        const int64_t number = (request.offset + at) / layout_.block_bytes;
        const int64_t there = layout_.rows_of(block, segment->id, uint64_t(number));
        for (int64_t row = 0; row < there; ++row) {
          keys.push_back(layout_.key(block, row));
          rows.push_back(layout_.row(block, row));
          from.push_back(slot_of(place, number, row));
        }
      }
    }
    size_t live = 0;
    {
      std::lock_guard lock(mutex_);
      std::vector<uint32_t> now(keys.size());
      index_->find(keys.data(), now.data(), int64_t(keys.size()));
      for (size_t i = 0; i < keys.size(); ++i) {
        if (now[i] != from[i]) continue;
        keys[live] = keys[i];
        rows[live] = rows[i];
        from[live++] = from[i];
      }
    }
    if (Status status = append({keys.data(), nullptr, 0, rows.data(), from.data()}, int64_t(live), true); !status.ok())
      return status;
  }
  return {};
}

bool SsdStore::read_each(const IoRequest& failed, std::vector<IoRequest>* read) const {
  for (int64_t at = 0; at < failed.bytes;) {
    std::vector<IoRequest> some;
    for (; at < failed.bytes && some.size() < size_t(io_->depth()); at += layout_.block_bytes) {
      some.push_back({FileCall::read, failed.file, failed.memory + at, layout_.block_bytes, failed.offset + at});
    }
    io_->run(&some);
    const size_t before = read->size();
    std::copy_if(some.begin(), some.end(), std::back_inserter(*read), [](const auto& one) { return one.moved >= 0; });
    // Where all fail the next ones will, and a disk may take a second for each.
    if (read->size() == before) return false;
  }
  return true;
}

void SsdStore::collect_in_background() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    const bool scarce = 4 * free_places() < int64_t(places_.size());
    const int64_t place = scarce && collected_ == nullptr ? choose() : -1;
    // Where half of a segment lives, moving it costs what it frees.
    if (place < 0 || 2 * places_[size_t(place)]->live > segment_rows()) {
      wake_.wait_for(lock, std::chrono::milliseconds(100));
      continue;
    }
    const int64_t bytes = places_[size_t(place)]->blocks * layout_.block_bytes;
    Status ignored;  // a writer that needs the place meets it
    collect(&lock, uint32_t(place), &ignored);
    const auto rest = std::chrono::milliseconds(1000 * bytes / options_.collect_bytes_per_second);
    wake_.wait_for(lock, rest, [this] { return ends_; });
  }
}

}  // namespace shoal
