#include "store/ssd.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "base/memory.h"
#include "index/batch.h"

namespace shoal {

namespace {

constexpr int64_t kWriteBytes = int64_t{1} << 20;  // of one request
constexpr int64_t kReadBytes = int64_t{2} << 20;   // of blocks that are read together
constexpr int64_t kRoundBytes = int64_t{4} << 20;  // of the requests that are made together
constexpr int64_t kMostSegmentBytes = int64_t{64} << 20;
constexpr int64_t kSegments = 64;       // of a store that is not small
constexpr int64_t kLeastBlocks = 4;     // of a segment
constexpr int64_t kLeastSegments = 12;  // fewer leave too little to collect
constexpr int64_t kReserved = 2;        // places for what is collected

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
      index_(std::make_unique<Index>()) {
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
  Status status = append({keys, rows, layout_.row_bytes, nullptr, nullptr}, n, false);
  {
    std::lock_guard lock(mutex_);
    stats_.write_nanoseconds += nanoseconds_since(begin);
  }
  wake_.notify_one();
  return status;
}

// Requests that are made together, and what they write.
struct SsdStore::Round {
  explicit Round(int64_t bytes) : memory(bytes) {}

  AlignedMemory memory;
  std::vector<Extent> extents;
  std::vector<IoRequest> requests;
  int64_t first = 0;  // row
  std::unique_ptr<PendingIo> pending;
};

Status SsdStore::append(const Source& source, int64_t n, bool collecting) {
  const int64_t blocks = (n + layout_.rows_per_block - 1) / layout_.rows_per_block;
  const int64_t bytes = std::min(kRoundBytes, blocks * layout_.block_bytes) + kWriteBytes + layout_.block_bytes;
  const bool several = blocks * layout_.block_bytes > kRoundBytes;
  // While one is on its way to the disk the other is filled.
  Round one(bytes), other(several ? bytes : 1);
  Round *now = &one, *before = &other;
  Status status;
  for (int64_t done = 0; done < n && status.ok();) {
    keep_first(&status, fill(source, n, collecting, &done, now));
    now->pending = io_->start(&now->requests);
    keep_first(&status, finish(source, collecting, before));
    std::swap(now, before);
  }
  keep_first(&status, finish(source, collecting, before));
  return status;
}

Status SsdStore::fill(const Source& source, int64_t n, bool collecting, int64_t* done, Round* round) {
  const int64_t most_blocks = std::max<int64_t>(kWriteBytes / layout_.block_bytes, 1);
  round->extents.clear();
  round->requests.clear();
  round->first = *done;
  char* at = round->memory.get();
  while (*done < n && at - round->memory.get() < kRoundBytes) {
    const int64_t blocks = (n - *done + layout_.rows_per_block - 1) / layout_.rows_per_block;
    Extent extent;
    {
      std::unique_lock lock(mutex_);
      Status status = give_out(&lock, std::min(blocks, most_blocks), collecting, &extent);
      if (!status.ok()) return status;
    }
    for (int64_t block = 0; block < extent.blocks; ++block) {
      char* const filled = at + block * layout_.block_bytes;
      const int64_t rows = std::min(layout_.rows_per_block, n - *done);
      for (int64_t row = 0; row < rows; ++row, ++*done) layout_.put(filled, row, source.keys[*done], source.row(*done));
      layout_.seal(filled, uint32_t(rows), extent.segment->id, uint64_t(extent.first_block + block));
      extent.rows += rows;
    }
    const int64_t bytes = extent.blocks * layout_.block_bytes;
    round->requests.push_back(
        {FileCall::write, &extent.segment->file, at, bytes, extent.first_block * layout_.block_bytes});
    round->extents.push_back(std::move(extent));
    at += bytes;
  }
  return {};
}

Status SsdStore::finish(const Source& source, bool collecting, Round* round) {
  Status status;
  if (round->pending == nullptr) return status;
  round->pending->wait();
  round->pending.reset();
  int64_t row = round->first;
  for (size_t i = 0; i < round->extents.size(); ++i) {
    Status written = round->requests[i].status();
    keep_first(&status, settle(round->extents[i], source, row, written.ok(), collecting));
    keep_first(&status, std::move(written));
    row += round->extents[i].rows;
  }
  return status;
}

Status SsdStore::give_out(std::unique_lock<std::mutex>* lock, int64_t blocks, bool collecting, Extent* extent) {
  while (true) {
    if (active_ >= 0 && places_[size_t(active_)]->blocks < segment_blocks_) {
      Segment& segment = *places_[size_t(active_)];
      *extent = {uint32_t(active_), places_[size_t(active_)], segment.blocks,
                 std::min(blocks, segment_blocks_ - segment.blocks), 0};
      segment.blocks += extent->blocks;
      ++segment.under_way;
      return {};
    }
    if (free_places() > (collecting ? 0 : kReserved)) {
      if (Status status = begin_segment(); !status.ok()) return status;
      continue;
    }
    Status status;
    if (collecting || (!collecting_ && !collect_one(lock, &status))) {
      if (!status.ok()) return status;
      return {Code::storage,
              "[file " + directory_.path() + "] no segment can be freed: " + std::to_string(index_->size()) +
                  " rows live in files for " + std::to_string(2 * capacity_) + ". Raise Ssd(size=), or erase keys."};
    }
    if (collecting_) freed_.wait(*lock, [this] { return !collecting_; });
  }
}

Status SsdStore::begin_segment() {
  auto segment = std::make_shared<Segment>();
  segment->id = next_id_++;
  const std::string path = directory_.path() + "/" + std::to_string(segment->id) + ".seg";
  if (Status status = File::create(path, options_.direct, &segment->file); !status.ok()) return status;
  const int64_t before = active_;
  active_ = free_.back();
  free_.pop_back();
  places_[size_t(active_)] = std::move(segment);
  if (before >= 0) drop_if_dead(uint32_t(before));
  return {};
}

Status SsdStore::settle(const Extent& extent, const Source& source, int64_t first, bool written, bool collecting) {
  std::lock_guard lock(mutex_);
  Segment& segment = *extent.segment;
  --segment.under_way;
  Status status;
  if (written) {
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots, had(static_cast<size_t>(extent.rows));
    find_all(source.keys + first, had.data(), extent.rows);
    for (int64_t i = 0; i < extent.rows; ++i) {
      const int64_t key = source.keys[first + i];
      const uint32_t slot =
          slot_of(extent.place, extent.first_block + i / layout_.rows_per_block, i % layout_.rows_per_block);
      const uint32_t before = had[size_t(i)];
      if (source.from != nullptr && before != source.from[first + i]) continue;  // written or erased meanwhile
      if (before == kNoSlot) {
        keys.push_back(key);
        slots.push_back(slot);
        continue;
      }
      index_->reassign(key, slot);
      ++segment.live;
      leave(before);
    }
    status = index_->reserve(int64_t(keys.size()));
    if (status.ok()) status = index_->insert(keys.data(), slots.data(), int64_t(keys.size()));
    if (status.ok()) segment.live += int64_t(keys.size());
    const int64_t bytes = extent.blocks * layout_.block_bytes;
    stats_.written_bytes += collecting ? 0 : bytes;
    stats_.written_rows += collecting ? 0 : extent.rows;
    stats_.collected_bytes += collecting ? bytes : 0;
    stats_.collected_rows += collecting ? extent.rows : 0;
  }
  drop_if_dead(extent.place);
  return status;
}

void SsdStore::find_all(const int64_t* keys, uint32_t* slots, int64_t n) const {
  int64_t missing = 0;
  shoal::find({{index_.get(), 0, n}}, {keys, false}, slots, &missing, 1);
}

void SsdStore::leave(uint32_t slot) {
  const uint32_t place = uint32_t(slot / segment_rows());
  --places_[place]->live;
  drop_if_dead(place);
}

void SsdStore::drop_if_dead(uint32_t place) {
  const std::shared_ptr<Segment>& segment = places_[place];
  if (segment == nullptr || segment->live > 0 || segment->under_way > 0 || int64_t(place) == active_) return;
  // A file that cannot be removed keeps its place; the next collection tries again.
  if (!remove_file(segment->file.path()).ok()) return;
  places_[place].reset();
  free_.push_back(place);
}

// ---- reading

// Rows that are wanted, in the order of their blocks, and those that are being read together.
struct SsdStore::Reading {
  struct Wanted {
    uint32_t slot;
    int64_t at;  // of the caller's keys
  };
  const int64_t* keys;
  char* rows;
  bool* found;
  std::vector<Wanted> wanted;
  std::vector<std::shared_ptr<Segment>> held;  // by place
  size_t next = 0;                             // that is not being read
  int64_t reads = 0, damages = 0;
};

struct SsdStore::ReadTogether {
  explicit ReadTogether(int64_t bytes) : memory(bytes) {}

  AlignedMemory memory;
  std::vector<IoRequest> requests;
  std::vector<size_t> firsts;  // of the wanted, by request; then the end
  std::unique_ptr<PendingIo> pending;
};

Status SsdStore::read(const int64_t* keys, char* rows, bool* found, int64_t n) {
  const auto begin = std::chrono::steady_clock::now();
  Reading reading{keys, rows, found, {}, std::vector<std::shared_ptr<Segment>>(places_.size())};
  {
    std::vector<uint32_t> slots(static_cast<size_t>(n));
    std::lock_guard lock(mutex_);
    find_all(keys, slots.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t slot = slots[size_t(i)];
      found[i] = false;
      if (slot == kNoSlot) continue;
      reading.wanted.push_back({slot, i});
      const size_t place = size_t(slot / segment_rows());
      if (reading.held[place] == nullptr) reading.held[place] = places_[place];
    }
  }
  // Rows of one block beside each other.
  std::sort(reading.wanted.begin(), reading.wanted.end(), [](const auto& a, const auto& b) { return a.slot < b.slot; });
  const int64_t most_blocks = std::max<int64_t>(kReadBytes / layout_.block_bytes, 1);
  const int64_t bytes = std::min<int64_t>(most_blocks, int64_t(reading.wanted.size()) + 1) * layout_.block_bytes;
  // While rows of some blocks are copied, others are being read.
  ReadTogether one(bytes), other(int64_t(reading.wanted.size()) > most_blocks ? bytes : 1);
  ReadTogether *now = &one, *before = &other;
  Status status;
  while (reading.next < reading.wanted.size()) {
    ask(&reading, most_blocks, now);
    now->pending = io_->start(&now->requests);
    keep_first(&status, take(&reading, before));
    std::swap(now, before);
  }
  keep_first(&status, take(&reading, before));
  std::lock_guard lock(mutex_);
  stats_.reads += reading.reads;
  stats_.read_bytes += reading.reads * layout_.block_bytes;
  stats_.damaged += reading.damages;
  ++stats_.read_calls;
  stats_.read_nanoseconds += nanoseconds_since(begin);
  return status;
}

void SsdStore::ask(Reading* reading, int64_t most_blocks, ReadTogether* some) const {
  const std::vector<Reading::Wanted>& wanted = reading->wanted;
  some->requests.clear();
  some->firsts.clear();
  while (reading->next < wanted.size() && int64_t(some->requests.size()) < most_blocks) {
    const int64_t block = wanted[reading->next].slot / layout_.rows_per_block;
    some->firsts.push_back(reading->next);
    some->requests.push_back({FileCall::read, &reading->held[size_t(block / segment_blocks_)]->file,
                              some->memory.get() + int64_t(some->requests.size()) * layout_.block_bytes,
                              layout_.block_bytes, block % segment_blocks_ * layout_.block_bytes});
    while (reading->next < wanted.size() && wanted[reading->next].slot / layout_.rows_per_block == block) {
      ++reading->next;
    }
  }
  some->firsts.push_back(reading->next);
  reading->reads += int64_t(some->requests.size());
}

Status SsdStore::take(Reading* reading, ReadTogether* some) const {
  Status status;
  if (some->pending == nullptr) return status;
  some->pending->wait();
  some->pending.reset();
  for (size_t i = 0; i < some->requests.size(); ++i) {
    const int64_t number = reading->wanted[some->firsts[i]].slot / layout_.rows_per_block;
    const Segment& segment = *reading->held[size_t(number / segment_blocks_)];
    const char* const block = some->requests[i].memory;
    if (Status answer = some->requests[i].status(); !answer.ok()) {
      keep_first(&status, std::move(answer));
      continue;
    }
    const int64_t there = layout_.rows_of(block, segment.id, uint64_t(number % segment_blocks_));
    reading->damages += there < 0;
    for (size_t at = some->firsts[i]; at < some->firsts[i + 1]; ++at) {
      const auto [slot, to] = reading->wanted[at];
      const int64_t row = slot % layout_.rows_per_block;
      if (row >= there || layout_.key(block, row) != reading->keys[to]) {
        keep_first(&status, damaged(segment, number % segment_blocks_));
        continue;
      }
      std::memcpy(reading->rows + to * layout_.row_bytes, layout_.row(block, row), size_t(layout_.row_bytes));
      reading->found[to] = true;
    }
  }
  return status;
}

Status SsdStore::damaged(const Segment& segment, int64_t block) const {
  return {Code::storage, "[file " + segment.file.path() + "] the block at " +
                             std::to_string(block * layout_.block_bytes) +
                             " is not what was written there: its checksum does not fit. Its rows are lost, others are "
                             "not. Erase their keys or restore the table from a checkpoint, and look at the disk's "
                             "health."};
}

void SsdStore::contains(const int64_t* keys, bool* found, int64_t n) const {
  std::vector<uint32_t> slots(static_cast<size_t>(n));
  std::lock_guard lock(mutex_);
  find_all(keys, slots.data(), n);
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
  std::vector<int64_t> keys;
  keys.reserve(size_t(index_->size()));
  index_->scan(0, index_->extent(), [&](int64_t key, uint32_t) { keys.push_back(key); });
  return keys;
}

void SsdStore::clear() {
  std::lock_guard lock(mutex_);
  index_ = std::make_unique<Index>();
  active_ = -1;
  for (uint32_t place = 0; place < places_.size(); ++place) {
    if (places_[place] == nullptr) continue;
    places_[place]->live = 0;
    drop_if_dead(place);
  }
}

SsdStats SsdStore::stats() const {
  std::lock_guard lock(mutex_);
  SsdStats stats = stats_;
  stats.rows = index_->size();
  stats.capacity = capacity_;
  stats.index_bytes = index_->bytes();
  for (const auto& segment : places_)
    stats.file_bytes += segment == nullptr ? 0 : segment->blocks * layout_.block_bytes;
  return stats;
}

// ---- collecting

int64_t SsdStore::choose() const {
  int64_t chosen = -1;
  for (size_t place = 0; place < places_.size(); ++place) {
    const Segment* segment = places_[place].get();
    if (segment == nullptr || int64_t(place) == active_ || segment->under_way > 0 || segment->stuck) continue;
    if (chosen < 0 || segment->live < places_[size_t(chosen)]->live) chosen = int64_t(place);
  }
  // One that is full frees nothing.
  return chosen >= 0 && places_[size_t(chosen)]->live < segment_rows() ? chosen : -1;
}

bool SsdStore::collect_one(std::unique_lock<std::mutex>* lock, Status* status) {
  const int64_t place = choose();
  if (place < 0) return false;
  const std::shared_ptr<Segment> segment = places_[size_t(place)];
  collecting_ = true;
  lock->unlock();
  Status moved;
  try {
    moved = move_rows(uint32_t(place), segment);
  } catch (const std::bad_alloc&) {
    moved = out_of_memory();
  }
  lock->lock();
  collecting_ = false;
  if (places_[size_t(place)] == segment) drop_if_dead(uint32_t(place));
  const bool freed = places_[size_t(place)] != segment;
  // What is left could not be read. Others still can be, so the file stays, and nobody tries it again.
  if (!freed && moved.ok()) {
    segment->stuck = segment->live > 0;
    moved = segment->stuck ? Status() : remove_file(segment->file.path());
  }
  keep_first(status, std::move(moved));
  freed_.notify_all();
  return freed || (status->ok() && segment->stuck);
}

Status SsdStore::move_rows(uint32_t place, const std::shared_ptr<Segment>& segment) {
  const int64_t in_request = std::max<int64_t>(kWriteBytes / layout_.block_bytes, 1);
  const int64_t in_round = std::max<int64_t>(kRoundBytes / layout_.block_bytes, 1);
  AlignedMemory memory(std::min(in_round, segment->blocks) * layout_.block_bytes);
  for (int64_t first = 0; first < segment->blocks; first += in_round) {
    const int64_t blocks = std::min(in_round, segment->blocks - first);
    std::vector<IoRequest> requests;
    for (int64_t at = 0; at < blocks; at += in_request) {
      requests.push_back({FileCall::read, &segment->file, memory.get() + at * layout_.block_bytes,
                          std::min(in_request, blocks - at) * layout_.block_bytes, (first + at) * layout_.block_bytes});
    }
    io_->run(&requests);
    std::vector<int64_t> keys;
    std::vector<const char*> rows;
    std::vector<uint32_t> from;
    for (const IoRequest& request : requests) {
      if (request.moved < 0) return request.status();
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
      find_all(keys.data(), now.data(), int64_t(keys.size()));
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

void SsdStore::collect_in_background() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    const bool scarce = 4 * free_places() < int64_t(places_.size());
    const int64_t place = scarce && !collecting_ ? choose() : -1;
    // Where half of a segment lives, moving it costs what it frees.
    if (place < 0 || 2 * places_[size_t(place)]->live > segment_rows()) {
      wake_.wait_for(lock, std::chrono::milliseconds(100));
      continue;
    }
    const int64_t bytes = places_[size_t(place)]->blocks * layout_.block_bytes;
    Status ignored;  // a writer that needs the place meets it
    collect_one(&lock, &ignored);
    const auto rest = std::chrono::milliseconds(1000 * bytes / options_.collect_bytes_per_second);
    wake_.wait_for(lock, rest, [this] { return ends_; });
  }
}

}  // namespace shoal
