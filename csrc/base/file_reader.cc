#include "base/file_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "base/memory.h"

namespace shoal {

Status FileReader::open(const FilePath& path, bool direct, FileOwner owner, std::unique_ptr<FileReader>* reader) {
  File plain, ahead;
  if (Status status = File::open_to_read(path, false, owner, &plain); !status.ok()) return status;
  if (direct) {
    if (Status status = File::open_to_read(path, true, owner, &ahead); !status.ok()) return status;
    // Another file may have got the name in between.
    if (!ahead.direct() || !ahead.is_same(plain)) ahead.close();
  }
  reader->reset(new FileReader(std::move(plain), std::move(ahead)));
  return {};
}

FileReader::FileReader(File plain, File ahead)
    : plain_(std::move(plain)), ahead_(std::move(ahead)), maker_(::getpid()) {}

FileReader::~FileReader() { close(); }

void FileReader::close() {
  if (::getpid() != maker_) return;
  std::lock_guard lock(callers_);
  end_threads();
  if (memory_ != nullptr) Buffers::instance().release(std::exchange(memory_, nullptr));
  is_ahead_ = false;
  plain_.close();
  ahead_.close();
}

Status FileReader::read(int64_t offset, void* out, int64_t bytes) {
  if (::getpid() != maker_) return plain_.read(out, bytes, offset);
  std::lock_guard lock(callers_);
  // Also what was just read once more: a header, and then all that it heads.
  const bool goes_on =
      is_ahead_ && offset >= ahead_end_ / kChunkBytes * kChunkBytes && offset - ahead_end_ <= kChunkBytes;
  if (goes_on) return read_ahead(offset, static_cast<char*>(out), bytes);
  const bool ascends = offset >= plain_end_ && offset - plain_end_ <= kChunkBytes;
  const int64_t in_a_row = ascends ? in_a_row_ + bytes : bytes;
  // A large read alone is worth it too, but not to give up what was read ahead elsewhere.
  if (offset >= 0 && in_a_row >= kRowBytes && (ascends || !is_ahead_)) {
    bool began = false;
    if (Status status = begin(offset, &began); !status.ok()) return status;
    if (began) return read_ahead(offset, static_cast<char*>(out), bytes);
  }
  Status status = plain_.read(out, bytes, offset);
  if (status.ok()) {
    plain_end_ = offset + bytes;
    in_a_row_ = in_a_row;
  }
  return status;
}

int64_t FileReader::bytes_from_ahead() {
  std::lock_guard lock(callers_);
  return from_ahead_;
}

Status FileReader::begin(int64_t offset, bool* began) {
  int64_t size = 0;
  if (Status status = plain_.size(&size); !status.ok()) return status;
  // The memory for it is no more than the file.
  if (size < kSlots * kChunkBytes || offset >= size - kChunkBytes) return {};
  if (memory_ == nullptr) memory_ = static_cast<char*>(Buffers::instance().acquire(size_t(kSlots * kChunkBytes)));
  if (memory_ == nullptr) return {};
  try {
    while (threads_.size() < size_t(kThreads)) threads_.emplace_back([this] { read_in_background(); });
  } catch (const std::system_error&) {
    if (threads_.empty()) return {};  // fewer will do
  }
  is_ahead_ = *began = true;
  return {};
}

Status FileReader::move_to(int64_t chunk) {
  int64_t size = 0;
  if (Status status = plain_.size(&size); !status.ok()) return status;
  first_ = chunk;
  std::lock_guard lock(mutex_);
  for (int64_t number = chunk; number < chunk + kSlots; ++number) {
    Slot& next = slot(number);
    const bool is_new = next.chunk != number;
    next.chunk = number;
    // One that is being read for another chunk is read again by its thread.
    if (next.state == State::reading || (!is_new && next.state != State::idle)) continue;
    next.status = {};
    next.state = number * kChunkBytes < size ? State::asked : State::idle;
  }
  wake_.notify_all();
  return {};
}

Status FileReader::read_ahead(int64_t offset, char* out, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t at = offset + done;
    const int64_t chunk = at / kChunkBytes, within = at % kChunkBytes;
    if (chunk != first_)
      if (Status status = move_to(chunk); !status.ok()) return status;
    Slot& from = slot(chunk);
    int64_t there = 0;
    {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [&] { return from.state == State::ready || from.state == State::idle; });
      if (!from.status.ok()) {
        // The next reads find out whether it can be read by now.
        Status failed = std::move(from.status);
        is_ahead_ = false;
        first_ = -1;
        for (Slot& other : slots_)
          if (other.state != State::reading) other = {};
        return failed;
      }
      if (from.state == State::ready) there = std::max<int64_t>(from.bytes - within, 0);
    }
    // No other thread touches a chunk that is ready.
    const int64_t piece = std::min(there, bytes - done);
    if (piece > 0) std::memcpy(out + done, memory_of(chunk) + within, size_t(piece));
    done += piece;
    from_ahead_ += piece;
    ahead_end_ = offset + done;
    if (done == bytes || within + piece == kChunkBytes) continue;
    // Beyond the end that the file had: it has grown, or the error says where it ends.
    Status status = plain_.read(out + done, bytes - done, offset + done);
    if (status.ok()) ahead_end_ = offset + bytes;
    return status;
  }
  return {};
}

void FileReader::read_in_background() {
  const File& file = ahead_.is_open() ? ahead_ : plain_;
  std::unique_lock lock(mutex_);
  while (true) {
    Slot* next = nullptr;
    wake_.wait(lock, [&] {
      for (Slot& each : slots_)
        if (each.state == State::asked && (next == nullptr || each.chunk < next->chunk)) next = &each;
      return ends_ || next != nullptr;
    });
    if (ends_) return;
    const int64_t chunk = next->chunk;
    next->state = State::reading;
    lock.unlock();
    int64_t bytes = 0;
    Status status;
    try {
      status = file.read_some(memory_of(chunk), kChunkBytes, chunk * kChunkBytes, &bytes);
    } catch (const std::bad_alloc&) {
      status = out_of_memory();
    }
    lock.lock();
    if (next->chunk != chunk) {
      next->state = State::asked;
      continue;
    }
    next->bytes = bytes;
    next->status = std::move(status);
    next->state = State::ready;
    ready_.notify_all();
  }
}

void FileReader::end_threads() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace shoal
