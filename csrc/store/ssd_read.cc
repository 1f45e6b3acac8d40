// Reading from stores on disk: many blocks at a time, from several stores at the same time.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>

#include "store/ssd.h"
#include "store/ssd_io.h"

namespace shoal {

namespace {

constexpr int64_t kReadBytes = int64_t{2} << 20;  // of the blocks that are being read at a time
// Up to this many rows of several stores are read by one thread: waking others, on cores that are busy, takes longer.
constexpr int64_t kFewRows = 1024;
constexpr size_t kNamedKeys = 10, kNamedFiles = 3;  // of those that an error is about

// Says what is wrong with a block that was requested and is not there.
std::string what_is_wrong(const IoRequest& answered) {
  const std::string at = std::to_string(answered.offset);
  const std::string reading = "reading " + std::to_string(answered.bytes) + " bytes at " + at;
  if (answered.moved < 0) {
    const int error = int(-answered.moved);
    return reading + " failed: " + std::strerror(error) + " (errno " + std::to_string(error) + ").";
  }
  if (answered.moved < answered.bytes)
    return reading + ": only " + std::to_string(answered.moved) + " are there. The file was cut.";
  return "the block at " + at + " is not what was written there: its checksum does not fit.";
}

std::string first_of(const std::vector<int64_t>& keys) {
  std::string named = std::to_string(keys.size()) + (keys.size() == 1 ? " key: " : " keys: ");
  for (size_t i = 0; i < std::min(keys.size(), kNamedKeys); ++i)
    named += (i == 0 ? "" : ", ") + std::to_string(keys[i]);
  if (keys.size() > kNamedKeys) named += " and " + std::to_string(keys.size() - kNamedKeys) + " more";
  return named;
}

}  // namespace

// Rows that are wanted of one store, in the order of their blocks.
struct SsdStore::Reading {
  struct Wanted {
    uint32_t slot;
    int64_t at;  // of the caller's keys
  };
  Read* read;
  std::vector<Wanted> wanted = {};
  std::vector<std::shared_ptr<Segment>> held = {};  // by place
  size_t next = 0;                                  // the first one that is not requested yet
  int64_t reads = 0, damages = 0;
  // The files on which something could not be read, and the first reason for each.
  struct Failed {
    const File* file;
    std::string what;
  };
  std::vector<Failed> failed = {};
  bool may_come_back = false, was_cut = false, is_damaged = false;  // some of it
};

// A block that is being read, and the wanted rows on it.
struct SsdStore::Block {
  IoRequest request;  // first: an answered request is its block's
  Reading* reading = nullptr;
  size_t begin = 0, end = 0;
};

Status SsdStore::read(const int64_t* keys, char* rows, bool* found, int64_t n, std::vector<int64_t>* lost) {
  Read read{this, keys, rows, found, n};
  read_here(&read, 1);
  if (lost != nullptr) *lost = std::move(read.lost);
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
        read.lost.clear();
      }
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(reads->size() - 1);
    while (others.size() + 1 < reads->size()) others.emplace_back(take_reads);
  } catch (const std::exception&) {
    // The threads that could be started, and this one, read everything.
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
  // More than the disk's queue depth: waiting requests take the place of answered ones while rows are copied.
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
    block.reading->read->store->take(block.reading, block);
    ask_next(&block);
  }
  for (const Reading& reading : readings) {
    reading.read->store->end_reading(reading, nanoseconds_since(begin) / int64_t(count));
    if (!reading.failed.empty()) tell_of_lost(reading);
  }
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
  // Rows of one block are next to each other.
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

void SsdStore::take(Reading* reading, const Block& block) const {
  const IoRequest& answered = block.request;
  Read& read = *reading->read;
  if (was_not_made(answered)) {
    keep_first(&read.status, answered.status());
    return;
  }
  const Segment& segment = *reading->held[size_t(reading->wanted[block.begin].slot / segment_rows())];
  const int64_t number = answered.offset / layout_.block_bytes;
  const bool is_whole = answered.moved == answered.bytes;
  const int64_t there = is_whole ? layout_.rows_of(answered.memory, segment.id, uint64_t(number)) : -1;
  reading->damages += answered.moved >= 0 && there < 0;
  const size_t lost_before = read.lost.size();
  for (size_t i = block.begin; i < block.end; ++i) {
    const auto [slot, to] = reading->wanted[i];
    const int64_t row = slot % layout_.rows_per_block;
    if (row >= there || layout_.key(answered.memory, row) != read.keys[to]) {
      read.lost.push_back(read.keys[to]);
      continue;
    }
    std::memcpy(read.rows + to * layout_.row_bytes, layout_.row(answered.memory, row), size_t(layout_.row_bytes));
    read.found[to] = true;
  }
  if (read.lost.size() > lost_before) note_failure(reading, answered);
}

void SsdStore::note_failure(Reading* reading, const IoRequest& answered) {
  reading->may_come_back |= answered.moved < 0;
  reading->was_cut |= answered.moved >= 0 && answered.moved < answered.bytes;
  reading->is_damaged |= answered.moved == answered.bytes;
  for (const Reading::Failed& failed : reading->failed)
    if (failed.file == answered.file) return;
  reading->failed.push_back({answered.file, what_is_wrong(answered)});
}

void SsdStore::tell_of_lost(const Reading& reading) {
  Read& read = *reading.read;
  if (!read.status.ok()) {  // the system has no memory or threads: other errors are reported when it does
    read.lost.clear();
    return;
  }
  std::sort(read.lost.begin(), read.lost.end());
  read.lost.erase(std::unique(read.lost.begin(), read.lost.end()), read.lost.end());
  std::string message;
  for (size_t i = 0; i < std::min(reading.failed.size(), kNamedFiles); ++i)
    message += "[file " + reading.failed[i].file->path() + "] " + reading.failed[i].what + " ";
  if (reading.failed.size() > kNamedFiles)
    message += "There are " + std::to_string(reading.failed.size() - kNamedFiles) + " more such files. ";
  message += "What was asked for and cannot be read are the rows of " + first_of(read.lost) + ". ";
  message += reading.may_come_back
                 ? "The others can. Try again, if the disk may have been away for a moment. Else `erase` these"
                 : "They are lost, the others are not. `erase` them";
  message +=
      " by `table.erase(error.keys)`, which reads nothing (`assign` would), or restore the table from a checkpoint. "
      "`table.unreadable()` finds all such keys.";
  if (reading.may_come_back || reading.is_damaged) message += " Look at the disk's health.";
  if (reading.was_cut) message += " Let nothing else write to that directory.";
  read.status = {Code::storage, std::move(message)};
}

}  // namespace shoal
