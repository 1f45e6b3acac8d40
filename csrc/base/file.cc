#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace shoal {

namespace {

constexpr const char* kLockName = "LOCK";

std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return "Free space on that disk, or lower Ssd(size=) or move it with Ssd(path=).";
    case EIO: return "The disk reported an error: look at its health, and move the table with Ssd(path=).";
    case EACCES:
    case EPERM:
    case EROFS: return "Make it writable for this user, or name another directory in Ssd(path=).";
    case ENOENT:
    case ENOTDIR: return "Name a directory that can be made in Ssd(path=).";
    case EMFILE:
    case ENFILE: return "Raise the limit of open files (ulimit -n).";
    default: return "Look at the disk and the directory, and try again.";
  }
}

int open_at(const std::string& path, int flags) {
  if (const int error = Faults::instance().check(FileCall::open, path)) {
    errno = error;
    return -1;
  }
  return ::open(path.c_str(), flags | O_CLOEXEC, 0644);
}

bool is_at(int descriptor, const std::string& path) {
  struct stat opened, named;
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

}  // namespace

Status file_failed(const std::string& path, const std::string& what, int error) {
  return {Code::storage, "[file " + path + "] " + what + ": " + std::strerror(error) + " (errno " +
                             std::to_string(error) + "). " + advice(error)};
}

File& File::operator=(File&& other) noexcept {
  if (this == &other) return *this;
  close();
  path_ = std::move(other.path_);
  descriptor_ = std::exchange(other.descriptor_, -1);
  direct_ = other.direct_;
  return *this;
}

Status File::create(const std::string& path, bool direct, File* file) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC;
  File made;
  made.path_ = path;
  if (direct) made.descriptor_ = open_at(path, kFlags | O_DIRECT);
  made.direct_ = made.descriptor_ >= 0;
  // A file system that cannot do without its cache says so with EINVAL.
  if (!made.direct_ && (!direct || errno == EINVAL)) made.descriptor_ = open_at(path, kFlags);
  if (made.descriptor_ < 0) return file_failed(path, "could not be made", errno);
  *file = std::move(made);
  return {};
}

Status File::read(void* to, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    if (const int error = Faults::instance().check(FileCall::read, path_))
      return answer(FileCall::read, -error, bytes, offset);
    const ssize_t moved = ::pread(descriptor_, static_cast<char*>(to) + done, size_t(bytes - done), offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return answer(FileCall::read, -errno, bytes, offset);
    if (moved == 0) break;
    done += moved;
  }
  return answer(FileCall::read, done, bytes, offset);
}

Status File::write(const void* from, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    if (const int error = Faults::instance().check(FileCall::write, path_))
      return answer(FileCall::write, -error, bytes, offset);
    const ssize_t moved =
        ::pwrite(descriptor_, static_cast<const char*>(from) + done, size_t(bytes - done), offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return answer(FileCall::write, -errno, bytes, offset);
    done += moved;
  }
  return {};
}

Status File::sync() const {
  int error = Faults::instance().check(FileCall::sync, path_);
  if (error == 0 && ::fdatasync(descriptor_) != 0) error = errno;
  return error == 0 ? Status() : file_failed(path_, "could not be brought to the disk", error);
}

void File::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

Status File::answer(FileCall call, int64_t moved, int64_t bytes, int64_t offset) const {
  if (moved == bytes) return {};
  const std::string what = std::string(call == FileCall::read ? "reading " : "writing ") + std::to_string(bytes) +
                           " bytes at " + std::to_string(offset);
  if (moved < 0) return file_failed(path_, what + " failed", int(-moved));
  return {Code::storage, "[file " + path_ + "] " + what + ": only " + std::to_string(moved) +
                             " are there. The file was cut: rows on it are lost. Restore the table from a checkpoint, "
                             "and let nothing else write to that directory."};
}

// ---- directories

OwnedDirectory& OwnedDirectory::operator=(OwnedDirectory&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::move(other.path_);
  lock_ = std::exchange(other.lock_, -1);
  return *this;
}

Status OwnedDirectory::take(const std::string& path, OwnedDirectory* directory) {
  std::error_code failed;
  std::filesystem::create_directories(path, failed);
  if (failed) return file_failed(path, "the directory could not be made", failed.value());
  const std::string name = path + "/" + kLockName;
  OwnedDirectory taken;
  int lock = -1;
  // An owner that goes removes its lock: the one that was opened may be no more.
  do {
    if (lock >= 0) ::close(lock);
    lock = open_at(name, O_RDWR | O_CREAT);
    if (lock < 0) return file_failed(name, "could not be opened", errno);
  } while (::flock(lock, LOCK_EX | LOCK_NB) == 0 && !is_at(lock, name));
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = "?";
    const ssize_t read = ::pread(lock, owner, sizeof owner - 1, 0);
    owner[read > 0 ? read : 1] = 0;
    ::close(lock);
    return {Code::storage, "[file " + path + "] wanted a directory of its own; process " + owner +
                               " has it. Name another one in Ssd(path=), or end that process."};
  }
  taken.lock_ = lock;  // from here on it is let go by itself
  const std::string owner = std::to_string(::getpid());
  if (::ftruncate(lock, 0) != 0 || ::pwrite(lock, owner.data(), owner.size(), 0) != ssize_t(owner.size()))
    return file_failed(name, "could not be written", errno);
  for (const auto& entry : std::filesystem::directory_iterator(path, failed)) {
    if (entry.path().extension() != ".seg") continue;
    if (Status status = remove_file(entry.path().string()); !status.ok()) return status;
  }
  if (failed) return file_failed(path, "the directory could not be read", failed.value());
  taken.path_ = path;
  *directory = std::move(taken);
  return {};
}

void OwnedDirectory::release() {
  if (lock_ < 0) return;
  if (!path_.empty()) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
      if (entry.path().extension() == ".seg") std::filesystem::remove(entry.path(), ignored);
    }
    std::filesystem::remove(path_ + "/" + kLockName, ignored);
    std::filesystem::remove(path_, ignored);  // unless something else is in it
  }
  ::close(std::exchange(lock_, -1));
  path_.clear();
}

Status remove_file(const std::string& path) {
  int error = Faults::instance().check(FileCall::remove, path);
  if (error == 0 && ::unlink(path.c_str()) != 0 && errno != ENOENT) error = errno;
  return error == 0 ? Status() : file_failed(path, "could not be removed", error);
}

}  // namespace shoal
