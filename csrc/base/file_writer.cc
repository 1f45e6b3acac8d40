#include "base/file_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "base/crc32c.h"
#include "base/memory.h"

namespace shoal {

Status FileWriter::create(const FilePath& path, bool direct, FileOwner owner, std::unique_ptr<FileWriter>* writer) {
  // Memory first: if there is none, no file is left over.
  char* const memory = static_cast<char*>(Buffers::instance().acquire(size_t(kBuffers * kBufferBytes)));
  if (memory == nullptr) return out_of_memory();
  File file;
  Status status = File::create_new(path, direct, owner, &file);
  if (!status.ok()) {
    Buffers::instance().release(memory);
    return status;
  }
  std::unique_ptr<FileWriter> made(new FileWriter(std::move(file), memory));
  try {
    made->thread_ = std::thread([writer = made.get()] { writer->write_in_background(); });
  } catch (const std::system_error& error) {
    (void)remove_file(path, owner);
    return file_failed(owner, path, "no thread could be started to write it", error.code().value());
  }
  *writer = std::move(made);
  return {};
}

FileWriter::FileWriter(File file, char* memory) : file_(std::move(file)), memory_(memory), maker_(::getpid()) {}

FileWriter::~FileWriter() {
  abandon();
  Buffers::instance().release(memory_);
}

Status FileWriter::append(const void* data, int64_t bytes) {
  return append_pieces(data, bytes, [](char* to, const char* from, int64_t n) { std::memcpy(to, from, size_t(n)); });
}

Status FileWriter::append_checked(const void* data, int64_t bytes, uint32_t before, uint32_t* crc) {
  static constexpr int64_t kCached = int64_t{16} << 10;  // what is copied is still in the first cache
  *crc = before;
  return append_pieces(data, bytes, [crc](char* to, const char* from, int64_t n) {
    for (int64_t done = 0; done < n; done += kCached) {
      const size_t piece = size_t(std::min(kCached, n - done));
      std::memcpy(to + done, from + done, piece);
      *crc = crc32c(to + done, piece, *crc);
    }
  });
}

template <typename Take>
Status FileWriter::append_pieces(const void* data, int64_t bytes, const Take& take) {
  if (Status status = check(); !status.ok()) return status;
  for (int64_t done = 0; done < bytes;) {
    const int64_t used = position_ % kBufferBytes;
    const int64_t piece = std::min(kBufferBytes - used, bytes - done);
    take(buffer(position_ / kBufferBytes) + used, static_cast<const char*>(data) + done, piece);
    done += piece;
    position_ += piece;
    if (position_ % kBufferBytes != 0) continue;
    if (Status status = hand_over(); !status.ok()) return status;
  }
  return {};
}

Status FileWriter::check() {
  if (::getpid() != maker_) {
    return {Code::storage, "[file " + path() + "] process " + std::to_string(maker_) +
                               " writes it; got a call in a forked child. Write a file of its own there."};
  }
  if (is_finished_ || is_abandoned_) {
    return {Code::storage, "[file " + path() + "] wanted a file that is being written; it was " +
                               (is_finished_ ? "finished" : "abandoned") + " before. Write another one."};
  }
  std::lock_guard lock(mutex_);
  return error_;
}

Status FileWriter::hand_over() {
  std::unique_lock lock(mutex_);
  ++filled_;
  wake_.notify_one();
  freed_.wait(lock, [this] { return filled_ - written_ <= kInFlight || !error_.ok(); });
  return error_;
}

void FileWriter::write_in_background() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ends_ || written_ < filled_; });
    if (ends_) return;
    const int64_t number = written_;
    lock.unlock();
    Status status;
    try {
      status = file_.write(buffer(number), kBufferBytes, number * kBufferBytes);
    } catch (const std::bad_alloc&) {
      status = out_of_memory();
    }
    lock.lock();
    if (!status.ok()) {
      error_ = std::move(status);
      freed_.notify_one();
      return;
    }
    ++written_;
    freed_.notify_one();
  }
}

Status FileWriter::finish() {
  if (is_finished_ && ::getpid() == maker_) return {};
  if (Status status = check(); !status.ok()) return status;
  {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [this] { return written_ == filled_ || !error_.ok(); });
    if (!error_.ok()) return error_;
  }
  const int64_t tail = position_ % kBufferBytes;
  // Direct writes are of whole blocks: the last one goes beyond the end, which is cut off again.
  const int64_t blocks = (tail + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  char* const last = buffer(position_ / kBufferBytes);
  Status status;
  if (tail > 0) {
    std::memset(last + tail, 0, size_t(blocks - tail));
    status = file_.write(last, file_.direct() ? blocks : tail, position_ - tail);
  }
  if (status.ok() && file_.direct() && blocks != tail) status = file_.truncate(position_);
  if (status.ok()) status = file_.sync();
  if (!status.ok()) {
    std::lock_guard lock(mutex_);
    error_ = status;
    return status;
  }
  is_finished_ = true;
  end_thread();
  return {};
}

void FileWriter::abandon() {
  if (::getpid() != maker_) return;
  is_abandoned_ = !is_finished_;
  end_thread();
}

void FileWriter::end_thread() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

}  // namespace shoal
