// A path in two parts: what the user named, in which links lead on as everywhere, and what is below it, in which none
// does. Files may come from a stranger: a link in them would lead out of the folder that the user named.
#pragma once

#include <sys/stat.h>

#include <string>

#include "base/status.h"

namespace shoal {

class FilePath {
 public:
  // Only what the user named. Implicit: a path is that unless names below it were added.
  FilePath(std::string root) : FilePath(std::move(root), {}) {}
  FilePath(const char* root) : FilePath(std::string(root)) {}
  // REQUIRES: `below` is names with slashes between them.
  FilePath(std::string root, std::string below);

  const std::string& string() const { return whole_; }
  const std::string& root() const { return root_; }
  const std::string& below() const { return below_; }
  // Whether its last name is followed where it is a link.
  bool is_followed() const { return below_.empty(); }

  // The last name.
  std::string name() const;
  // Another name in the folder.
  FilePath operator/(const std::string& name) const;
  FilePath with_name(const std::string& name) const;
  // The folder that the last name is in.
  FilePath parent() const;

  bool operator==(const FilePath& other) const { return root_ == other.root_ && below_ == other.below_; }

 private:
  std::string root_, below_, whole_;
};

// A name in an open folder, as the system's calls that end in "at" take them.
struct NameAt {
  int folder;
  const char* name;
  // For calls that take AT_ flags, and for those that take O_ flags: no link is followed, or one that is the name.
  int at_flags, open_flags;
};

// The folder that a path's last name is in, held open: from the root on, no link led there.
class HeldFolder {
 public:
  HeldFolder() = default;
  HeldFolder(const HeldFolder&) = delete;
  HeldFolder& operator=(const HeldFolder&) = delete;
  ~HeldFolder();

  // An errno, 0 if all is well. The path must stay until the last use of `at`.
  int open(const FilePath& path);
  NameAt at() const { return at_; }

 private:
  int descriptor_ = -1;
  NameAt at_ = {};
  std::string name_;
};

enum class FileKind { file, folder, link, other };

FileKind kind_of(const struct stat& found);

// "a pipe", "a link to '/etc'": what stands at a name.
std::string told_of(const NameAt& at, const struct stat& found);

// The error that says what stands in the way of a file, or a folder, at a path: a link below the root, or something of
// another kind. Ok where nothing does.
Status look_for_obstacle(const FilePath& path, FileKind wanted);

}  // namespace shoal
