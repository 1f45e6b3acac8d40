#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace shoal {

namespace {

struct Advice {
  const char *space, *health, *rights, *place, *cut;
};

constexpr Advice kSsdAdvice = {
    .space = "Free space on that disk, or lower Ssd(size=) or move it with Ssd(path=).",
    .health = "The disk reported an error: look at its health, and move the table with Ssd(path=).",
    .rights = "Make it writable for this user, or name another directory in Ssd(path=).",
    .place = "Name a directory that can be made in Ssd(path=).",
    .cut =
        "The file was cut: rows on it are lost. Restore the table from a checkpoint, and let nothing else write to "
        "that "
        "directory.",
};
constexpr Advice kLogAdvice = {
    .space = "Free space on that disk, or keep the log on another one.",
    .health = "The disk reported an error: look at its health, and keep the log on another one.",
    .rights = "Let this user read and write there, or keep the log elsewhere.",
    .place = "Look whether the log's directory was moved or removed, and name the one that is there.",
    .cut = "The file was cut, or is still being written. Let nothing but its log write to that directory.",
};

const Advice& advice_for(FileOwner owner) { return owner == FileOwner::ssd ? kSsdAdvice : kLogAdvice; }

const char* advice(FileOwner owner, int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return advice_for(owner).space;
    case EIO: return advice_for(owner).health;
    case EACCES:
    case EPERM:
    case EROFS: return advice_for(owner).rights;
    case ENOENT:
    case ENOTDIR: return advice_for(owner).place;
    case EEXIST: return "Remove it, or choose another name.";
    case EBADF: return "It was closed, or opened for reading only: open it again.";
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
  int descriptor;
  do {
    descriptor = PowerCut::instance().records(path) ? PowerCut::instance().open(path, flags | O_CLOEXEC, 0644)
                                                    : ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// Where a call is to be made, makes it until no signal came between; an errno, 0 if all is well.
template <typename Call>
int ask(FileCall kind, const std::string& path, const Call& call) {
  if (const int error = Faults::instance().check(kind, path)) return error;
  while (call() != 0)
    if (errno != EINTR) return errno;
  return 0;
}

Status answer_of(int error, FileOwner owner, const std::string& path, const char* failed) {
  return error == 0 ? Status() : file_failed(owner, path, failed, error);
}

bool is_same_file(const struct stat& one, const struct stat& other) {
  return one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

}  // namespace

Status file_failed(FileOwner owner, const std::string& path, const std::string& what, int error) {
  return {Code::storage, "[file " + path + "] " + what + ": " + std::strerror(error) + " (errno " +
                             std::to_string(error) + "). " + advice(owner, error)};
}

File& File::operator=(File&& other) noexcept {
  if (this == &other) return *this;
  close();
  path_ = std::move(other.path_);
  owner_ = other.owner_;
  descriptor_ = std::exchange(other.descriptor_, -1);
  direct_ = other.direct_;
  return *this;
}

Status File::open(const std::string& path, int flags, bool direct, FileOwner owner, const char* failed, File* file) {
  File made;
  made.path_ = path;
  made.owner_ = owner;
  // Opening a pipe would wait for whoever writes to it; for files of other kinds the flag means nothing.
  made.descriptor_ = open_at(path, flags | O_NONBLOCK);
  if (made.descriptor_ < 0) return file_failed(owner, path, failed, errno);
  struct stat found;
  if (::fstat(made.descriptor_, &found) != 0) return file_failed(owner, path, failed, errno);
  if (!S_ISREG(found.st_mode)) {
    return {Code::storage, "[file " + path + "] wanted a file; got " +
                               (S_ISDIR(found.st_mode) ? "a directory" : "a pipe, a socket or a device") +
                               ". Remove it, or choose another name."};
  }
  // Asked for afterwards: a file system that cannot do it would refuse to open, and yet make the file.
  if (direct) made.direct_ = ::fcntl(made.descriptor_, F_SETFL, O_DIRECT) == 0;
  *file = std::move(made);
  return {};
}

Status File::create(const std::string& path, bool direct, File* file, FileOwner owner) {
  return open(path, O_RDWR | O_CREAT | O_TRUNC, direct, owner, "could not be made", file);
}

Status File::create_new(const std::string& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDWR | O_CREAT | O_EXCL, direct, owner, "could not be made", file);
}

Status File::open_to_write(const std::string& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDWR | O_CREAT, direct, owner, "could not be opened", file);
}

Status File::open_to_read(const std::string& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDONLY, direct, owner, "could not be opened", file);
}

bool File::is_at(const std::string& path) const {
  struct stat opened, named;
  return ::fstat(descriptor_, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && is_same_file(opened, named);
}

bool File::is_same(const File& other) const {
  struct stat one, another;
  return ::fstat(descriptor_, &one) == 0 && ::fstat(other.descriptor_, &another) == 0 && is_same_file(one, another);
}

int64_t File::read_until_end(void* to, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    if (const int error = Faults::instance().check(FileCall::read, path_)) return -error;
    const ssize_t moved = ::pread(descriptor_, static_cast<char*>(to) + done, size_t(bytes - done), offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    done += moved;
    // A direct read that ends within a block has met the file's end, and cannot go on from there.
    if (moved == 0 || (direct_ && done % kBlockBytes != 0)) break;
  }
  return done;
}

Status File::read(void* to, int64_t bytes, int64_t offset) const {
  return answer(FileCall::read, read_until_end(to, bytes, offset), bytes, offset);
}

Status File::read_some(void* to, int64_t bytes, int64_t offset, int64_t* moved) const {
  *moved = read_until_end(to, bytes, offset);
  return *moved < 0 ? answer(FileCall::read, *moved, bytes, offset) : Status();
}

Status File::write(const void* from, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    if (const int error = Faults::instance().check(FileCall::write, path_))
      return answer(FileCall::write, -error, bytes, offset);
    const char* const at = static_cast<const char*>(from) + done;
    const size_t left = size_t(bytes - done);
    const int64_t moved = PowerCut::instance().records(path_)
                              ? PowerCut::instance().write(descriptor_, at, left, offset + done)
                              : ::pwrite(descriptor_, at, left, offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return answer(FileCall::write, -errno, bytes, offset);
    done += moved;
  }
  return {};
}

Status File::size(int64_t* bytes) const {
  struct stat found = {};
  const int error = ask(FileCall::size, path_, [&] { return ::fstat(descriptor_, &found); });
  *bytes = found.st_size;
  return answer_of(error, owner_, path_, "its size could not be read");
}

Status File::truncate(int64_t bytes) const {
  const int error = ask(FileCall::truncate, path_, [&] {
    return PowerCut::instance().records(path_) ? PowerCut::instance().truncate(descriptor_, bytes)
                                               : ::ftruncate(descriptor_, bytes);
  });
  if (error == 0) return {};
  return file_failed(owner_, path_, "could not be cut to " + std::to_string(bytes) + " bytes", error);
}

Status File::sync() const {
  const int error = ask(FileCall::sync, path_, [&] {
    return PowerCut::instance().records(path_) ? PowerCut::instance().sync(descriptor_) : ::fdatasync(descriptor_);
  });
  return answer_of(error, owner_, path_, "could not be brought to the disk");
}

void File::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

Status File::answer(FileCall call, int64_t moved, int64_t bytes, int64_t offset) const {
  if (moved == bytes) return {};
  const std::string what = std::string(call == FileCall::read ? "reading " : "writing ") + std::to_string(bytes) +
                           " bytes at " + std::to_string(offset);
  if (moved < 0) return file_failed(owner_, path_, what + " failed", int(-moved));
  return {Code::storage,
          "[file " + path_ + "] " + what + ": only " + std::to_string(moved) + " are there. " + advice_for(owner_).cut};
}

// ---- names

Status remove_file(const std::string& path, FileOwner owner) {
  const int error = ask(FileCall::remove, path, [&] {
    return PowerCut::instance().records(path) ? PowerCut::instance().remove(path) : ::unlink(path.c_str());
  });
  return answer_of(error == ENOENT ? 0 : error, owner, path, "could not be removed");
}

Status remove_directory(const std::string& path, FileOwner owner) {
  // Where power cuts are recorded it stays: files that were in it may come back.
  const int error =
      ask(FileCall::remove, path, [&] { return PowerCut::instance().records(path) ? 0 : ::rmdir(path.c_str()); });
  return answer_of(error == ENOENT ? 0 : error, owner, path, "could not be removed");
}

Status rename_file(const std::string& from, const std::string& to, FileOwner owner) {
  const int error = ask(FileCall::rename, from, [&] {
    const bool recorded = PowerCut::instance().records(from) || PowerCut::instance().records(to);
    return recorded ? PowerCut::instance().rename(from, to) : ::rename(from.c_str(), to.c_str());
  });
  return error == 0 ? Status() : file_failed(owner, from, "could not be renamed to " + to, error);
}

Status sync_directory(const std::string& path, FileOwner owner) {
  const int error = ask(FileCall::sync_directory, path, [&] {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return -1;
    const bool recorded = PowerCut::instance().is_active();
    const int result = recorded ? PowerCut::instance().sync_directory(descriptor) : ::fsync(descriptor);
    const int failed = errno;
    ::close(descriptor);
    errno = failed;
    return result;
  });
  return answer_of(error, owner, path, "the directory could not be brought to the disk");
}

Status make_directories(const std::string& path, FileOwner owner, bool durable) {
  constexpr const char* kFailed = "the directory could not be made";
  if (const int error = Faults::instance().check(FileCall::make_directory, path))
    return file_failed(owner, path, kFailed, error);
  const std::string first = path.starts_with('/') ? "/" : ".";
  std::string above = first;
  int removed = 0;
  for (size_t end = 0; end < path.size();) {
    end = std::min(path.find('/', end + 1), path.size());
    const std::string part = path.substr(0, end);
    const int made = PowerCut::instance().records(part) ? PowerCut::instance().make_directory(part, 0755)
                                                        : ::mkdir(part.c_str(), 0755);
    // Others may remove empty ones meanwhile.
    if (made != 0 && errno == ENOENT && ++removed < 10) {
      end = 0;
      above = first;
      continue;
    }
    if (made != 0 && errno != EEXIST) return file_failed(owner, part, kFailed, errno);
    if (made == 0 && durable) {
      Status status = sync_directory(above, owner);
      if (!status.ok()) {
        ::rmdir(part.c_str());  // or the next call would take it for an old one, which needs no sync
        return status;
      }
    }
    above = part;
  }
  struct stat found;
  const int error = ::stat(path.c_str(), &found) != 0 ? errno : S_ISDIR(found.st_mode) ? 0 : ENOTDIR;
  return answer_of(error, owner, path, kFailed);
}

Status list_directory(const std::string& path, FileOwner owner, std::vector<std::string>* names) {
  names->clear();
  DIR* directory = nullptr;
  int error = ask(FileCall::list, path, [&] { return (directory = ::opendir(path.c_str())) == nullptr ? -1 : 0; });
  while (error == 0) {
    errno = 0;
    const dirent* const entry = ::readdir(directory);
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names->push_back(name);
  }
  if (directory != nullptr) ::closedir(directory);
  std::sort(names->begin(), names->end());
  return answer_of(error, owner, path, "the directory could not be read");
}

Status file_size(const std::string& path, FileOwner owner, std::optional<int64_t>* bytes) {
  struct stat found = {};
  const int error = ask(FileCall::size, path, [&] { return ::stat(path.c_str(), &found); });
  *bytes = error == 0 ? std::optional<int64_t>(found.st_size) : std::nullopt;
  return answer_of(error == ENOENT ? 0 : error, owner, path, "its size could not be read");
}

}  // namespace shoal
