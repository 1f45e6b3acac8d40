#include "base/file_path.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace shoal {

namespace {

constexpr int kFolder = O_PATH | O_DIRECTORY | O_CLOEXEC;

std::string joined(const std::string& folder, const std::string& name) {
  if (name.empty() || folder.empty() || folder == ".") return name.empty() ? folder : name;
  return folder.back() == '/' ? folder + name : folder + "/" + name;
}

// One that leads no way up, and not to several.
bool is_name(const std::string& name) { return !name.empty() && name != "." && name != ".."; }

Status wrong_kind(const std::string& path, FileKind wanted, const std::string& got, bool is_link) {
  return {Code::storage, "[file " + path + "] wanted a " + (wanted == FileKind::folder ? "folder" : "file") + "; got " +
                             got + ". " +
                             (is_link ? "No link is followed below the folder that was named: put what it leads to "
                                        "in its place, or remove it."
                                      : "Remove it, or choose another name.")};
}

}  // namespace

FilePath::FilePath(std::string root, std::string below)
    : root_(std::move(root)), below_(std::move(below)), whole_(joined(root_, below_)) {}

std::string FilePath::name() const {
  const size_t end = whole_.find_last_not_of('/');
  if (end == std::string::npos) return "";
  const size_t slash = whole_.rfind('/', end);
  return whole_.substr(slash + 1, end - slash);  // from 0 on, without a slash
}

FilePath FilePath::operator/(const std::string& name) const {
  return {root_, below_.empty() ? name : below_ + "/" + name};
}

FilePath FilePath::with_name(const std::string& name) const { return parent() / name; }

FilePath FilePath::parent() const {
  if (!below_.empty()) {
    const size_t slash = below_.rfind('/');
    return {root_, slash == std::string::npos ? "" : below_.substr(0, slash)};
  }
  const size_t end = root_.find_last_not_of('/');
  const size_t slash = end == std::string::npos ? 0 : root_.rfind('/', end);
  if (slash == std::string::npos) return {"."};
  const size_t last = root_.find_last_not_of('/', slash);
  return {last == std::string::npos ? "/" : root_.substr(0, last + 1)};
}

HeldFolder::~HeldFolder() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int HeldFolder::open(const FilePath& path) {
  if (path.is_followed()) {
    at_ = {AT_FDCWD, path.root().c_str(), 0, 0};
    return 0;
  }
  const std::string& below = path.below();
  descriptor_ = ::open(path.root().c_str(), kFolder);
  if (descriptor_ < 0) return errno;
  size_t begin = 0;
  while (true) {
    const size_t slash = below.find('/', begin);
    name_ = below.substr(begin, slash - begin);
    if (!is_name(name_)) return EINVAL;
    if (slash == std::string::npos) break;
    const int next = ::openat(descriptor_, name_.c_str(), kFolder | O_NOFOLLOW);
    if (next < 0) return errno;
    ::close(std::exchange(descriptor_, next));
    begin = slash + 1;
  }
  at_ = {descriptor_, name_.c_str(), AT_SYMLINK_NOFOLLOW, O_NOFOLLOW};
  return 0;
}

FileKind kind_of(const struct stat& found) {
  if (S_ISREG(found.st_mode)) return FileKind::file;
  if (S_ISDIR(found.st_mode)) return FileKind::folder;
  return S_ISLNK(found.st_mode) ? FileKind::link : FileKind::other;
}

std::string told_of(const NameAt& at, const struct stat& found) {
  if (S_ISREG(found.st_mode)) return "a file";
  if (S_ISDIR(found.st_mode)) return "a directory";
  if (S_ISFIFO(found.st_mode)) return "a pipe";
  if (S_ISSOCK(found.st_mode)) return "a socket";
  if (!S_ISLNK(found.st_mode)) return "a device";
  char target[256];
  const ssize_t bytes = ::readlinkat(at.folder, at.name, target, sizeof target);
  return bytes < 0 ? "a link" : "a link to '" + std::string(target, size_t(bytes)) + "'";
}

Status look_for_obstacle(const FilePath& path, FileKind wanted) {
  const std::string& below = path.below();
  size_t slash = 0;
  // Each folder on the way down, then the path itself.
  while (slash != std::string::npos) {
    slash = below.find('/', slash + 1);
    const FilePath part(path.root(), below.substr(0, slash));
    const FileKind kind = slash == std::string::npos ? wanted : FileKind::folder;
    HeldFolder folder;
    struct stat found;
    if (folder.open(part) != 0 || ::fstatat(folder.at().folder, folder.at().name, &found, folder.at().at_flags) != 0)
      return {};
    if (kind_of(found) != kind)
      return wrong_kind(part.string(), kind, told_of(folder.at(), found), S_ISLNK(found.st_mode));
  }
  return {};
}

}  // namespace shoal
