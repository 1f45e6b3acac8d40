#include "base/file_lock.h"

#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

namespace shoal {

namespace {

// A lock belongs to an open file, which a forked child has too: if it kept it open, the lock would outlive its process.
class OpenLocks {
 public:
  static OpenLocks& instance() {
    static OpenLocks* const made = new OpenLocks;  // never destroyed: a fork may come late
    return *made;
  }

  // No fork comes between the open and its entry.
  Status open(const FilePath& path, FileOwner owner, File* file) {
    std::lock_guard lock(mutex_);
    descriptors_.reserve(descriptors_.size() + 1);
    Status status = File::open_to_write(path, false, owner, file);
    if (status.ok()) descriptors_.push_back(file->descriptor());
    return status;
  }

  // Whether this process has the file open elsewhere, too. Its number would not tell: containers count their own.
  bool has_another(const File& file) {
    struct stat wanted, found;
    if (::fstat(file.descriptor(), &wanted) != 0) return false;
    std::lock_guard lock(mutex_);
    return std::any_of(descriptors_.begin(), descriptors_.end(), [&](int other) {
      return other != file.descriptor() && ::fstat(other, &found) == 0 && found.st_dev == wanted.st_dev &&
             found.st_ino == wanted.st_ino;
    });
  }

  void close(int descriptor) {
    std::lock_guard lock(mutex_);
    std::erase(descriptors_, descriptor);
    ::close(descriptor);
  }

 private:
  OpenLocks() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     // Closing leaves the lock with the parent; unlocking would take it from there.
                     for (const int descriptor : instance().descriptors_) ::close(descriptor);
                     instance().descriptors_.clear();
                     instance().mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  std::vector<int> descriptors_;
};

// An errno, 0 if all is well.
int locked(const File& file, bool wait) {
  if (const int error = Faults::instance().check(FileCall::lock, file.path())) return error;
  return ::flock(file.descriptor(), wait ? LOCK_EX : LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

// The same. Not by File's calls: no power cut has to take it back.
int written(const File& file, const std::string& content) {
  if (const int error = Faults::instance().check(FileCall::lock, file.path())) return error;
  if (::ftruncate(file.descriptor(), 0) != 0) return errno;
  const ssize_t moved = ::pwrite(file.descriptor(), content.data(), content.size(), 0);
  return moved == ssize_t(content.size()) ? 0 : moved < 0 ? errno : ENOSPC;
}

// "process 4711 (log)", as far as the file has it: anything may stand there.
std::string holder_in(const File& file) {
  char text[64];
  int64_t bytes = 0;
  if (!file.read_some(text, sizeof text, 0, &bytes).ok()) bytes = 0;
  const char* at = text;
  const char* const end = text + bytes;
  const auto take = [&](auto belongs) {
    const char* const begin = at;
    at = std::find_if_not(at, end, belongs);
    return std::string(begin, at);
  };
  const std::string process = take([](char c) { return '0' <= c && c <= '9'; });
  if (process.empty() || process.size() > 10) return "another process";
  if (at != end && *at == ' ') ++at;
  const std::string word = take([](char c) { return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z'); });
  return "process " + process + (word.empty() ? "" : " (" + word + ")");
}

}  // namespace

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  if (this == &other) return *this;
  release();
  file_ = std::move(other.file_);
  holder_ = other.holder_;
  is_locked_ = std::exchange(other.is_locked_, false);
  return *this;
}

Status FileLock::take(const FilePath& path, const std::string& word, FileOwner owner, FileLock* lock, bool wait) {
  FileLock taken;
  taken.holder_ = ::getpid();
  // A file that was removed since it was opened is no lock: the next process would lock another file.
  while (!taken.is_locked_ || !taken.file_.is_in_place()) {
    taken.release();
    if (Status status = OpenLocks::instance().open(path, owner, &taken.file_); !status.ok()) return status;
    while (const int error = locked(taken.file_, wait)) {
      if (error == EINTR) continue;
      if (error != EWOULDBLOCK) return file_failed(owner, path, "could not be locked", error);
      const bool is_own = OpenLocks::instance().has_another(taken.file_);
      return {Code::storage,
              "[file " + path.string() + "] wanted it for this process alone; " + holder_in(taken.file_) + " has it" +
                  (is_own ? ", which is this one. Close what has it here, or " : ". End that one, or ") +
                  (owner == FileOwner::ssd ? "name another directory in Ssd(path=)." : "choose another directory.")};
    }
    taken.is_locked_ = true;
  }
  const std::string content = std::to_string(taken.holder_) + (word.empty() ? "" : " " + word) + "\n";
  if (const int error = written(taken.file_, content)) return file_failed(owner, path, "could not be written", error);
  *lock = std::move(taken);
  return {};
}

void FileLock::release() {
  if (!file_.is_open()) return;
  const int descriptor = file_.detach();
  const bool was_locked = std::exchange(is_locked_, false);
  if (::getpid() != holder_) return;  // a forked child: it is closed there, and may be another file's by now
  // No error should name a process that no longer has the lock; if this fails, its number stays.
  if (was_locked) [[maybe_unused]]
    const int ignored = ::ftruncate(descriptor, 0);
  // Not by closing alone: a child that is just being forked has not closed its own yet.
  ::flock(descriptor, LOCK_UN);
  OpenLocks::instance().close(descriptor);
}

bool FileLock::is_held() const { return is_locked_ && ::getpid() == holder_; }

bool FileLock::is_in_place() const { return is_held() && file_.is_in_place(); }

}  // namespace shoal
