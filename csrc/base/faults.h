// What tests put between the core and the operating system: calls that answer with an error of their choice, and power
// cuts, which take back what no sync made durable.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/file_path.h"
#include "base/status.h"

namespace shoal {

// lock: to take one, and then to write whose it is. open_ring, hand_over: of io_uring, whose path is "io_uring".
enum class FileCall {
  open,
  read,
  write,
  sync,
  remove,
  rename,
  link,
  truncate,
  sync_directory,
  list,
  make_directory,
  size,
  lock,
  open_ring,
  hand_over
};

struct Fault {
  FileCall call;
  std::string path_part;
  int error;      // an errno
  int64_t after;  // calls that are let through first
  int64_t times;  // then so many answer with it
};

// The next calls of a kind, on files whose path has a certain part, answer with an error.
class Faults {
 public:
  static Faults& instance();

  void inject(Fault fault);
  void clear();

  // The errno that this call answers with, 0 if it is to be made.
  int check(FileCall call, const std::string& path) {
    return active_.load(std::memory_order_relaxed) ? look(call, path) : 0;
  }

 private:
  int look(FileCall call, const std::string& path);

  std::atomic<bool> active_{false};
  std::mutex mutex_;
  std::vector<Fault> faults_;
};

// While it records, every change to a file whose path has a certain part remembers what it replaced, until it is
// durable: writes and truncates by a sync of the file; creates, renames and removes by a sync of the directory that has the
// name (of a rename: the new one). A cut takes any subset of the rest back:
// - of a write, any of its sectors of 512 bytes; what it made the file grow by and did not reach the disk reads as zeros;
// - a truncate and a change of names as a whole. A rename leaves the old name or the new one, never none; a name that
//   moved on, by a rename that stays, had been there; without the name of a directory all that is in it is gone.
// This is what POSIX allows, and more than some file systems do.
//
// Thread safety: every method may be called from any thread. What a forked child does is not seen.
class PowerCut {
 public:
  static PowerCut& instance();

  // Forgets what was recorded before; what is on the disk now counts as durable.
  void record(std::string path_part);
  void stop();
  // Takes back what the seed chooses and stops. The same calls and the same seed leave the same files. The process that
  // had files open must be dead by then: what it writes to them later may be lost.
  Status cut(uint64_t seed);

  bool is_active() const { return active_.load(std::memory_order_relaxed); }
  bool records(const std::string& path) { return is_active() && look(path); }

  // The system's calls of these names, with what they replace remembered: -1 and errno where they fail.
  int open(const NameAt& at, int flags, unsigned mode);
  int64_t write(int descriptor, const void* from, size_t bytes, int64_t offset);
  int truncate(int descriptor, int64_t bytes);
  int sync(int descriptor);
  int rename(const NameAt& from, const NameAt& to);
  int link(const NameAt& from, const NameAt& to);
  int remove(const NameAt& at);
  int make_directory(const NameAt& at, unsigned mode);
  // `descriptor` is the directory's.
  int sync_directory(int descriptor);

 private:
  using Identity = std::pair<uint64_t, uint64_t>;  // device and inode
  class Descriptor;
  // To one file's data.
  struct Change {
    bool truncates;
    int64_t offset;  // the new size, of a truncate
    int64_t bytes;
    int64_t size_before;
    std::string replaced;
  };
  struct Changed {
    Identity identity;
    std::shared_ptr<Descriptor> file;
    std::vector<Change> changes;
  };
  // A place for a name: it is one even if the directory gets another name.
  struct Place {
    Identity directory_identity;
    std::shared_ptr<Descriptor> directory;
    std::string name;

    bool operator==(const Place& other) const {
      return directory_identity == other.directory_identity && name == other.name;
    }
  };
  enum class Naming { create, rename, remove };
  struct NameChange {
    Naming kind;
    Place from;  // of a rename
    Place to;    // that got a name, or lost it
    std::shared_ptr<Descriptor> replaced;
  };
  struct Random;

  bool look(const std::string& path);
  void forget();
  static bool identify(int descriptor, Identity* identity);
  Changed* changed(int descriptor);
  bool place_of(const NameAt& at, Place* place);
  void note_truncate(Changed* file, int64_t bytes);
  // The change that gave this name, of those before number `before`; -1 if it is durable.
  int64_t named_by(const Place& place, size_t before) const;
  static Status cut_data(const Changed& file, Random* random);
  Status cut_names(Random* random);
  static Status restore(const Place& place, const Descriptor& content);

  std::atomic<bool> active_{false};
  std::mutex mutex_;
  std::string path_part_;
  std::vector<Changed> files_;     // in the order of their first change
  std::vector<NameChange> names_;  // in the order they were made
};

}  // namespace shoal
