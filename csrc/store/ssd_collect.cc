// Collecting the segments of a store on disk: rows that live are appended anew, and the file goes.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>

#include "store/ssd.h"
#include "store/ssd_io.h"

namespace shoal {

namespace {

constexpr int64_t kMoveBytes = int64_t{4} << 20;  // that are read to be collected, at a time

int64_t blocks_in_round(const BlockLayout& layout) { return std::max<int64_t>(kMoveBytes / layout.block_bytes, 1); }

}  // namespace

// Whichever writes fail: once they succeed again, a store that holds no more rows than its capacity, and can read all
// of them, can be written to. Let B be the blocks of a segment, and room() those that collecting may write to: of free
// places, after the end of its active segment, and in holes. Then, whenever nothing is being collected,
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
// most two thirds full even if there are only kLeastSegments. So each collected segment leaves at least one block more
// after the end and in free places, until one free place is left for the writer.
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
  // The remaining rows could not be read. Other segments can be, so this file stays, and is not tried again while
  // others can be freed.
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
      // A write that failed may have left the file short: what lies after its end was never a row.
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
    // If all fail, the next ones will too, and a disk may take a second for each.
    if (read->size() == before) return false;
  }
  return true;
}

void SsdStore::collect_in_background() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    const bool scarce = 4 * free_places() < int64_t(places_.size());
    const int64_t place = scarce && collected_ == nullptr ? choose() : -1;
    // If half of a segment's rows live, moving them costs as much as it frees.
    if (place < 0 || 2 * places_[size_t(place)]->live > segment_rows()) {
      wake_.wait_for(lock, std::chrono::milliseconds(100));
      continue;
    }
    const int64_t bytes = places_[size_t(place)]->blocks * layout_.block_bytes;
    Status ignored;  // a writer that needs the place gets the error
    collect(&lock, uint32_t(place), &ignored);
    const auto rest = std::chrono::milliseconds(1000 * bytes / options_.collect_bytes_per_second);
    wake_.wait_for(lock, rest, [this] { return ends_; });
  }
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
                             ", have rows that cannot be read. Look at the disk's health; `erase` the keys that the "
                             "table's `unreadable()` finds, or restore the table from a checkpoint."};
}

}  // namespace shoal
