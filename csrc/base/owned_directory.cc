#include "base/owned_directory.h"

#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace shoal {

namespace {

constexpr const char* kLockName = "LOCK";

Status remove_segments(const FilePath& path) {
  std::vector<std::string> names;
  Status status = list_directory(path, FileOwner::ssd, &names);
  for (const std::string& name : names) {
    if (!name.ends_with(".seg")) continue;
    if (Status removed = remove_file(path / name); status.ok()) status = std::move(removed);
  }
  return status;
}

bool is_there(const FilePath& path) {
  std::optional<FileEntry> entry;
  return !look_at(path, FileOwner::ssd, &entry).ok() || entry.has_value();
}

// Directories above owned ones that did not exist before. The storage that made one may close before others in it do:
// the last one removes it. Directories above that are the user's own, and stay.
class MadeAbove {
 public:
  static MadeAbove& instance() {
    static MadeAbove* const made = new MadeAbove;  // never destroyed: a directory may be released late
    return *made;
  }

  void note(const FilePath& path) {
    std::lock_guard lock(mutex_);
    made_.insert(path.string());
  }
  void remove_if_empty(const FilePath& path) {
    std::lock_guard lock(mutex_);
    if (made_.contains(path.string()) && remove_directory(path, FileOwner::ssd).ok()) made_.erase(path.string());
  }

 private:
  std::mutex mutex_;
  std::set<std::string> made_;
};

}  // namespace

OwnedDirectory& OwnedDirectory::operator=(OwnedDirectory&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::exchange(other.path_, FilePath(""));
  lock_ = std::move(other.lock_);
  return *this;
}

Status OwnedDirectory::take(const FilePath& path, OwnedDirectory* directory) {
  FileLock lock;
  Status status;
  // An owner that goes removes its directory, maybe between the two calls.
  for (int tries = 0; tries < 10; ++tries) {
    const bool is_above = is_there(path.parent());
    status = make_directories(path, FileOwner::ssd, false);
    if (!status.ok()) return status;
    if (!is_above) MadeAbove::instance().note(path.parent());
    status = FileLock::take(path / kLockName, "", FileOwner::ssd, &lock);
    if (status.ok() || is_there(path)) break;
  }
  if (!status.ok()) return status;
  OwnedDirectory taken;
  taken.path_ = path;
  taken.lock_ = std::move(lock);
  if (status = remove_segments(path); !status.ok()) return status;
  *directory = std::move(taken);
  return {};
}

void OwnedDirectory::release() {
  const FilePath path = std::exchange(path_, FilePath(""));
  // Before the lock is released: the next owner makes files of its own. Files that cannot be removed stay for it.
  if (lock_.is_held()) {
    (void)remove_segments(path);
    (void)remove_file(path / kLockName);
    (void)remove_directory(path, FileOwner::ssd);
    MadeAbove::instance().remove_if_empty(path.parent());
  }
  lock_.release();
}

}  // namespace shoal
