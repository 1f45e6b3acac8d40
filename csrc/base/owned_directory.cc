#include "base/owned_directory.h"

#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace shoal {

namespace {

constexpr const char* kLockName = "/LOCK";

Status remove_segments(const std::string& path) {
  std::vector<std::string> names;
  Status status = list_directory(path, FileOwner::ssd, &names);
  for (const std::string& name : names) {
    if (!name.ends_with(".seg")) continue;
    if (Status removed = remove_file(path + "/" + name); status.ok()) status = std::move(removed);
  }
  return status;
}

bool is_there(const std::string& path) {
  std::optional<int64_t> bytes;
  return !file_size(path, FileOwner::ssd, &bytes).ok() || bytes.has_value();
}

std::string above(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  const size_t slash = end == std::string::npos ? end : path.rfind('/', end);
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// Directories above owned ones that there were not before. Whoever made one may go before others in it do: the last takes
// it along. Not what is above that: it is the user's own.
class MadeAbove {
 public:
  static MadeAbove& instance() {
    static MadeAbove* const made = new MadeAbove;  // never destroyed: a directory may be released late
    return *made;
  }

  void note(const std::string& path) {
    std::lock_guard lock(mutex_);
    made_.insert(path);
  }
  void remove_if_empty(const std::string& path) {
    std::lock_guard lock(mutex_);
    if (made_.contains(path) && remove_directory(path, FileOwner::ssd).ok()) made_.erase(path);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> made_;
};

}  // namespace

OwnedDirectory& OwnedDirectory::operator=(OwnedDirectory&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::exchange(other.path_, {});
  lock_ = std::move(other.lock_);
  return *this;
}

Status OwnedDirectory::take(const std::string& path, OwnedDirectory* directory) {
  FileLock lock;
  Status status;
  // An owner that goes removes its directory, maybe between the two calls.
  for (int tries = 0; tries < 10; ++tries) {
    const bool is_above = is_there(above(path));
    status = make_directories(path, FileOwner::ssd, false);
    if (!status.ok()) return status;
    if (!is_above) MadeAbove::instance().note(above(path));
    status = FileLock::take(path + kLockName, "", FileOwner::ssd, &lock);
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
  const std::string path = std::exchange(path_, {});
  // Before it is let go: whoever comes next makes its own. What cannot be removed stays, for the next owner.
  if (lock_.is_held()) {
    (void)remove_segments(path);
    (void)remove_file(path + kLockName);
    (void)remove_directory(path, FileOwner::ssd);
    MadeAbove::instance().remove_if_empty(above(path));
  }
  lock_.release();
}

}  // namespace shoal
