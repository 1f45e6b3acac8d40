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

int open_at(const FilePath& path, const NameAt& at, int flags) {
  flags |= O_CLOEXEC | at.open_flags;
  int descriptor;
  do {
    descriptor = PowerCut::instance().records(path.string()) ? PowerCut::instance().open(at, flags, 0644)
                                                             : ::openat(at.folder, at.name, flags, 0644);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

// Where a call is to be made, makes it until no signal came between; an errno, 0 if all is well.
template <typename Call>
int ask(FileCall kind, const FilePath& path, const Call& call) {
  if (const int error = Faults::instance().check(kind, path.string())) return error;
  while (call() != 0)
    if (errno != EINTR) return errno;
  return 0;
}

// The same for a call on the path's last name.
template <typename Call>
int ask_at(FileCall kind, const FilePath& path, const Call& call) {
  HeldFolder folder;
  if (const int error = Faults::instance().check(kind, path.string())) return error;
  if (const int error = folder.open(path)) return error;
  while (call(folder.at()) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

// The errors that come where something of another kind stands at a name, or at one that leads there.
bool may_be_obstacle(int error) {
  return error == ELOOP || error == ENOTDIR || error == EISDIR || error == ENXIO || error == ENODEV || error == EPERM;
}

// `wanted`: what should stand at the path.
Status answer_of(int error, FileOwner owner, const FilePath& path, FileKind wanted, const std::string& failed) {
  if (error == 0) return {};
  if (may_be_obstacle(error))
    if (Status status = look_for_obstacle(path, wanted); !status.ok()) return status;
  return file_failed(owner, path, failed, error);
}

int open_directory(const NameAt& at) {
  return ::openat(at.folder, at.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | at.open_flags);
}

bool is_same_file(const struct stat& one, const struct stat& other) {
  return one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

}  // namespace

Status file_failed(FileOwner owner, const FilePath& path, const std::string& what, int error) {
  return {Code::storage, "[file " + path.string() + "] " + what + ": " + std::strerror(error) + " (errno " +
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

Status File::open(const FilePath& path, int flags, bool direct, FileOwner owner, const char* failed, File* file) {
  File made;
  made.path_ = path;
  made.owner_ = owner;
  struct stat found;
  HeldFolder folder;
  int error = Faults::instance().check(FileCall::open, path.string());
  if (error == 0) error = folder.open(path);
  if (error != 0) return answer_of(error, owner, path, FileKind::file, failed);
  // Before it is opened: a device may do something then. And what was opened, in case that it was put there since: opening
  // a pipe would wait for a writer; O_NONBLOCK does not wait, and means nothing for files.
  const NameAt& at = folder.at();
  const bool is_there = ::fstatat(at.folder, at.name, &found, at.at_flags) == 0;
  if (!is_there || S_ISREG(found.st_mode)) made.descriptor_ = open_at(path, at, flags | O_NONBLOCK | O_NOCTTY);
  if (made.descriptor_ >= 0 && ::fstat(made.descriptor_, &found) != 0) return file_failed(owner, path, failed, errno);
  if (made.descriptor_ < 0 && (!is_there || S_ISREG(found.st_mode)))
    return answer_of(errno, owner, path, FileKind::file, failed);
  if (!S_ISREG(found.st_mode)) {
    if (Status status = look_for_obstacle(path, FileKind::file); !status.ok()) return status;
    return file_failed(owner, path, failed, ENXIO);
  }
  // Asked for afterwards: a file system that cannot do it would refuse to open, and yet make the file.
  if (direct) made.direct_ = ::fcntl(made.descriptor_, F_SETFL, O_DIRECT) == 0;
  *file = std::move(made);
  return {};
}

Status File::create(const FilePath& path, bool direct, File* file, FileOwner owner) {
  File made;
  if (Status status = open(path, O_RDWR | O_CREAT, direct, owner, "could not be made", &made); !status.ok())
    return status;
  // Not by the open: it is known by now to be a file.
  if (Status status = made.truncate(0); !status.ok()) return status;
  *file = std::move(made);
  return {};
}

Status File::create_new(const FilePath& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDWR | O_CREAT | O_EXCL, direct, owner, "could not be made", file);
}

Status File::open_to_write(const FilePath& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDWR | O_CREAT, direct, owner, "could not be opened", file);
}

Status File::open_to_read(const FilePath& path, bool direct, FileOwner owner, File* file) {
  return open(path, O_RDONLY, direct, owner, "could not be opened", file);
}

// By the whole path at once, which takes one call of each commit instead of five: it changes nothing, and where a link
// leads to the same file, that file is the one that is written to anyway.
bool File::is_in_place() const {
  const int flags = path_.is_followed() ? 0 : AT_SYMLINK_NOFOLLOW;
  struct stat opened, named;
  return ::fstat(descriptor_, &opened) == 0 && ::fstatat(AT_FDCWD, path().c_str(), &named, flags) == 0 &&
         is_same_file(opened, named);
}

bool File::is_same(const File& other) const {
  struct stat one, another;
  return ::fstat(descriptor_, &one) == 0 && ::fstat(other.descriptor_, &another) == 0 && is_same_file(one, another);
}

int64_t File::read_until_end(void* to, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    if (const int error = Faults::instance().check(FileCall::read, path())) return -error;
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
    if (const int error = Faults::instance().check(FileCall::write, path()))
      return answer(FileCall::write, -error, bytes, offset);
    const char* const at = static_cast<const char*>(from) + done;
    const size_t left = size_t(bytes - done);
    const int64_t moved = PowerCut::instance().records(path())
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
  return answer_of(error, owner_, path_, FileKind::file, "its size could not be read");
}

Status File::next_data(int64_t offset, int64_t* at) const {
  *at = ::lseek(descriptor_, offset, SEEK_DATA);
  if (*at >= 0) return {};
  *at = offset;
  // No more data; or a file system that does not tell, where all of it may be.
  return errno == ENXIO ? size(at) : Status();
}

Status File::truncate(int64_t bytes) const {
  const int error = ask(FileCall::truncate, path_, [&] {
    return PowerCut::instance().records(path()) ? PowerCut::instance().truncate(descriptor_, bytes)
                                                : ::ftruncate(descriptor_, bytes);
  });
  if (error == 0) return {};
  return file_failed(owner_, path_, "could not be cut to " + std::to_string(bytes) + " bytes", error);
}

Status File::sync() const {
  const int error = ask(FileCall::sync, path_, [&] {
    return PowerCut::instance().records(path()) ? PowerCut::instance().sync(descriptor_) : ::fdatasync(descriptor_);
  });
  return answer_of(error, owner_, path_, FileKind::file, "could not be brought to the disk");
}

void File::close() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

Status File::answer(FileCall call, int64_t moved, int64_t bytes, int64_t offset) const {
  if (moved == bytes) return {};
  const std::string what = std::string(call == FileCall::read ? "reading " : "writing ") + std::to_string(bytes) +
                           " bytes at " + std::to_string(offset);
  if (moved < 0) return file_failed(owner_, path_, what + " failed", int(-moved));
  return {Code::storage, "[file " + path() + "] " + what + ": only " + std::to_string(moved) + " are there. " +
                             advice_for(owner_).cut};
}

// ---- names

Status remove_file(const FilePath& path, FileOwner owner) {
  const int error = ask_at(FileCall::remove, path, [&](const NameAt& at) {
    return PowerCut::instance().records(path.string()) ? PowerCut::instance().remove(at)
                                                       : ::unlinkat(at.folder, at.name, 0);
  });
  return answer_of(error == ENOENT ? 0 : error, owner, path, FileKind::file, "could not be removed");
}

Status remove_directory(const FilePath& path, FileOwner owner) {
  // Where power cuts are recorded it stays: files that were in it may come back.
  const int error = ask_at(FileCall::remove, path, [&](const NameAt& at) {
    return PowerCut::instance().records(path.string()) ? 0 : ::unlinkat(at.folder, at.name, AT_REMOVEDIR);
  });
  return answer_of(error == ENOENT ? 0 : error, owner, path, FileKind::folder, "could not be removed");
}

// A name that two paths have is given or taken by one call. An errno, 0 if all is well.
template <typename Call>
static int ask_both(FileCall kind, const FilePath& from, const FilePath& to, const Call& call) {
  HeldFolder folder;
  if (const int error = folder.open(to)) return error;
  return ask_at(kind, from, [&](const NameAt& at) { return call(at, folder.at()); });
}

static bool records(const FilePath& from, const FilePath& to) {
  return PowerCut::instance().records(from.string()) || PowerCut::instance().records(to.string());
}

Status rename_file(const FilePath& from, const FilePath& to, FileOwner owner) {
  const int error = ask_both(FileCall::rename, from, to, [&](const NameAt& at, const NameAt& at_to) {
    return records(from, to) ? PowerCut::instance().rename(at, at_to)
                             : ::renameat(at.folder, at.name, at_to.folder, at_to.name);
  });
  if (may_be_obstacle(error)) {
    for (const FilePath& path : {from, to})
      if (Status status = look_for_obstacle(path.parent(), FileKind::folder); !status.ok()) return status;
  }
  return error == 0 ? Status() : file_failed(owner, from, "could not be renamed to " + to.string(), error);
}

Status link_file(const FilePath& path, const FilePath& to, FileOwner owner, bool* made) {
  const int error = ask_both(FileCall::link, path, to, [&](const NameAt& at, const NameAt& at_to) {
    return records(path, to) ? PowerCut::instance().link(at, at_to)
                             : ::linkat(at.folder, at.name, at_to.folder, at_to.name, 0);
  });
  *made = error == 0;
  if (error == 0 || error == EPERM || error == EOPNOTSUPP || error == EMLINK || error == EXDEV) return {};
  return answer_of(error, owner, path, FileKind::file, "could not be called " + to.string());
}

Status sync_directory(const FilePath& path, FileOwner owner) {
  const int error = ask_at(FileCall::sync_directory, path, [&](const NameAt& at) {
    const int descriptor = open_directory(at);
    if (descriptor < 0) return -1;
    const bool recorded = PowerCut::instance().is_active();
    const int result = recorded ? PowerCut::instance().sync_directory(descriptor) : ::fsync(descriptor);
    const int failed = errno;
    ::close(descriptor);
    errno = failed;
    return result;
  });
  return answer_of(error, owner, path, FileKind::folder, "the directory could not be brought to the disk");
}

// The path and the folders above it, down from the first that is named.
static std::vector<FilePath> parts_of(const FilePath& path) {
  std::vector<FilePath> parts;
  for (size_t end = 0; end < path.root().size();) {
    end = std::min(path.root().find('/', end + 1), path.root().size());
    parts.emplace_back(path.root().substr(0, end));
  }
  for (size_t end = 0; end < path.below().size();) {
    end = std::min(path.below().find('/', end + 1), path.below().size());
    parts.emplace_back(path.root(), path.below().substr(0, end));
  }
  return parts;
}

Status make_directories(const FilePath& path, FileOwner owner, bool durable) {
  constexpr const char* kFailed = "the directory could not be made";
  if (const int error = Faults::instance().check(FileCall::make_directory, path.string()))
    return file_failed(owner, path, kFailed, error);
  const std::vector<FilePath> parts = parts_of(path);
  int removed = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const FilePath& part = parts[i];
    HeldFolder folder;
    int error = folder.open(part);
    bool is_made = false;
    if (error == 0) {
      const NameAt& at = folder.at();
      is_made = (PowerCut::instance().records(part.string()) ? PowerCut::instance().make_directory(at, 0755)
                                                             : ::mkdirat(at.folder, at.name, 0755)) == 0;
      error = is_made ? 0 : errno;
    }
    // Others may remove empty ones meanwhile.
    if (error == ENOENT && ++removed < 10) {
      i = size_t(-1);
      continue;
    }
    if (error != 0 && error != EEXIST) return answer_of(error, owner, part, FileKind::folder, kFailed);
    if (!is_made || !durable) continue;
    const FilePath above = i > 0 ? parts[i - 1] : FilePath(path.root().starts_with('/') ? "/" : ".");
    if (Status status = sync_directory(above, owner); !status.ok()) {
      // Or the next call would take it for an old one, which needs no sync.
      ::unlinkat(folder.at().folder, folder.at().name, AT_REMOVEDIR);
      return status;
    }
  }
  struct stat found;
  HeldFolder folder;
  int error = folder.open(path);
  if (error == 0 && ::fstatat(folder.at().folder, folder.at().name, &found, folder.at().at_flags) != 0) error = errno;
  if (error == 0 && !S_ISDIR(found.st_mode)) error = ENOTDIR;
  if (error == ENOTDIR && path.is_followed()) return file_failed(owner, path, kFailed, error);
  return answer_of(error, owner, path, FileKind::folder, kFailed);
}

Status list_directory(const FilePath& path, FileOwner owner, std::vector<std::string>* names) {
  names->clear();
  DIR* directory = nullptr;
  int error = ask_at(FileCall::list, path, [&](const NameAt& at) {
    const int descriptor = open_directory(at);
    if (descriptor < 0) return -1;
    if ((directory = ::fdopendir(descriptor)) != nullptr) return 0;
    const int failed = errno;
    ::close(descriptor);
    errno = failed;
    return -1;
  });
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
  return answer_of(error, owner, path, FileKind::folder, "the directory could not be read");
}

// What the system tells of a name; nothing where there is none. An errno, 0 if all is well.
static int status_at(const FilePath& path, std::optional<struct stat>* found) {
  struct stat held = {};
  const int error =
      ask_at(FileCall::size, path, [&](const NameAt& at) { return ::fstatat(at.folder, at.name, &held, at.at_flags); });
  *found = error == 0 ? std::optional<struct stat>(held) : std::nullopt;
  return error == ENOENT ? 0 : error;
}

Status file_size(const FilePath& path, FileOwner owner, std::optional<int64_t>* bytes) {
  std::optional<struct stat> found;
  const int error = status_at(path, &found);
  bytes->reset();
  if (found.has_value() && !S_ISREG(found->st_mode)) return look_for_obstacle(path, FileKind::file);
  if (found.has_value()) *bytes = int64_t(found->st_size);
  return answer_of(error, owner, path, FileKind::file, "its size could not be read");
}

Status look_at(const FilePath& path, FileOwner owner, std::optional<FileEntry>* entry) {
  std::optional<struct stat> found;
  const int error = status_at(path, &found);
  entry->reset();
  if (found.has_value()) *entry = FileEntry{kind_of(*found), uint32_t(found->st_uid), int64_t(found->st_blocks) * 512};
  return answer_of(error, owner, path, FileKind::file, "it could not be looked at");
}

}  // namespace shoal
