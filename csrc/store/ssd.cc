#include "store/ssd.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "base/hash.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "store/ssd_io.h"

namespace shoal {

namespace {

constexpr int64_t kWrites = 4;  // requests of one call that are under way at a time
constexpr int64_t kMostSegmentBytes = int64_t{64} << 20;
constexpr int64_t kSegments = 64;       // of a store that is not small
constexpr int64_t kLeastBlocks = 4;     // of a segment
constexpr int64_t kLeastSegments = 12;  // fewer leave too little to collect
constexpr int64_t kReserved = 2;        // places that only collection may take; one would do, if all could be read
constexpr size_t kSpares = kReserved;   // dead files that are kept: for places that are free, so all fit into the size
constexpr int kThreads = 2;             // that fill blocks: two are faster than a disk

bool all_different(const int64_t* keys, int64_t n) {
  // Keys in ascending order, as torch.unique gives them, differ.
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

}  // namespace

Status SsdStore::open(const SsdOptions& options, std::shared_ptr<Io> io, std::unique_ptr<SsdStore>* store) {
  const BlockLayout layout = BlockLayout::of(options.row_bytes);
  const int64_t least = kLeastSegments * kLeastBlocks * layout.block_bytes;
  if (options.max_bytes < least) {
    return {Code::storage, "[file " + options.directory.string() + "] rows of " + std::to_string(options.row_bytes) +
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
          // Writes under way keep their segments from being freed: they must be settled before this call waits for a
          // segment.
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
      // Segments that other calls write to cannot be freed yet. None of these calls waits for this one: their own
      // writes are settled first.
      if (under_way_ > 0) {
        freed_.wait(*lock, [this, before = settled_] { return settled_ != before; });
        continue;
      }
    }
    // A disk may be away for a while only.
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
    // Rows that were moved within a segment would keep it from being freed.
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
    const FilePath path = directory_.place() / (std::to_string(segment->id) + ".seg");
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
  // If its file cannot be removed, the call that needs the place gets the error.
  if (--places_[place]->live == 0) (void)drop_if_dead(place);
}

bool SsdStore::is_written_to(uint32_t place) const {
  const bool is_active = place == active_[false] || place == active_[true];
  return places_[place]->under_way > 0 || (is_active && places_[place]->blocks < segment_blocks_);
}

Status SsdStore::drop_if_dead(uint32_t place) {
  const Segment* const segment = places_[place].get();
  if (segment == nullptr || segment->live > 0 || is_written_to(place)) return {};
  // A new row could be written to the place where collection has read an old row of the same key.
  if (segment == collected_.get()) return {};
  return drop(place, !segment->failed && !segment->stuck);
}

Status SsdStore::drop(uint32_t place, bool keep_file) {
  Segment& segment = *places_[place];
  // A file that cannot be removed keeps its place; the next collection tries again.
  if (keep_file && spares_promised_ < kSpares) {
    segment.spares = spares_;
    ++spares_promised_;
  } else if (Status status = remove_file(segment.file.place()); !status.ok()) {
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

// ---- rows by key

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
  for (const File& file : spares_->files) (void)remove_file(file.place());  // nothing is on it
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

}  // namespace shoal
