#include "base/faults.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace shoal {

Faults& Faults::instance() {
  static Faults faults;
  return faults;
}

void Faults::inject(Fault fault) {
  std::lock_guard lock(mutex_);
  faults_.push_back(std::move(fault));
  active_ = true;
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
  active_ = false;
}

int Faults::look(FileCall call, const std::string& path) {
  std::lock_guard lock(mutex_);
  for (Fault& fault : faults_) {
    if (fault.call != call || path.find(fault.path_part) == std::string::npos) continue;
    if (fault.after > 0) {
      --fault.after;
    } else if (fault.times > 0) {
      --fault.times;
      return fault.error;
    }
  }
  return 0;
}

// ---- power cuts

namespace {

constexpr int64_t kSector = 512;

Status cut_failed(const std::string& what) {
  return {Code::storage,
          "[power cut] " + what + ": " + std::strerror(errno) + ". Its files are in no state to be tested."};
}

// All of the bytes, or as many as there are.
bool read_all(int descriptor, std::string* bytes, int64_t offset) {
  size_t done = 0;
  while (done < bytes->size()) {
    const ssize_t moved = ::pread(descriptor, bytes->data() + done, bytes->size() - done, offset + int64_t(done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return false;
    if (moved == 0) break;
    done += size_t(moved);
  }
  bytes->resize(done);
  return true;
}

bool write_all(int descriptor, const char* from, int64_t bytes, int64_t offset) {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t moved = ::pwrite(descriptor, from + done, size_t(bytes - done), offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return false;
    done += moved;
  }
  return true;
}

int64_t size_of(int descriptor) {
  struct stat found;
  return ::fstat(descriptor, &found) == 0 ? int64_t(found.st_size) : 0;
}

}  // namespace

class PowerCut::Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }

 private:
  const int number_;
};

struct PowerCut::Random {
  uint64_t state;
  // In percent, for this cut: some lose all, some nothing.
  uint64_t stays = 0;

  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  void choose_share() { stays = next() % 5 * 25; }
  bool keeps() { return next() % 100 < stays; }
};

PowerCut& PowerCut::instance() {
  static PowerCut cut;
  return cut;
}

void PowerCut::record(std::string path_part) {
  std::lock_guard lock(mutex_);
  forget();
  path_part_ = std::move(path_part);
  active_ = true;
}

void PowerCut::stop() {
  std::lock_guard lock(mutex_);
  forget();
}

void PowerCut::forget() {
  active_ = false;
  files_.clear();
  names_.clear();
}

bool PowerCut::look(const std::string& path) {
  std::lock_guard lock(mutex_);
  return active_ && path.find(path_part_) != std::string::npos;
}

bool PowerCut::identify(int descriptor, Identity* identity) {
  struct stat found;
  if (::fstat(descriptor, &found) != 0) return false;
  *identity = {uint64_t(found.st_dev), uint64_t(found.st_ino)};
  return true;
}

// A descriptor of its own: it reads past what direct I/O demands, and keeps a removed file's bytes.
PowerCut::Changed* PowerCut::changed(int descriptor) {
  Identity identity;
  if (!identify(descriptor, &identity)) return nullptr;
  for (Changed& file : files_)
    if (file.identity == identity) return &file;
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) return nullptr;
  files_.push_back({identity, std::make_shared<Descriptor>(own), {}});
  return &files_.back();
}

bool PowerCut::place_of(const NameAt& at, Place* place) {
  std::string whole = at.name;
  while (whole.size() > 1 && whole.back() == '/') whole.pop_back();
  const size_t slash = whole.rfind('/');
  const std::string above = slash == std::string::npos ? "." : slash == 0 ? "/" : whole.substr(0, slash);
  const int own = ::openat(at.folder, above.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (own < 0) return false;
  place->directory = std::make_shared<Descriptor>(own);
  place->name = slash == std::string::npos ? whole : whole.substr(slash + 1);
  if (!identify(own, &place->directory_identity)) return false;
  // One descriptor a directory, however many names change in it.
  for (const NameChange& change : names_) {
    if (change.to.directory_identity == place->directory_identity) {
      place->directory = change.to.directory;
      break;
    }
  }
  return true;
}

void PowerCut::note_truncate(Changed* file, int64_t bytes) {
  const int64_t before = size_of(file->file->get());
  std::string replaced(size_t(std::max<int64_t>(before - bytes, 0)), 0);
  read_all(file->file->get(), &replaced, bytes);
  file->changes.push_back({true, bytes, 0, before, std::move(replaced)});
}

int PowerCut::open(const NameAt& at, int flags, unsigned mode) {
  std::lock_guard lock(mutex_);
  Place place;
  if (!place_of(at, &place)) return -1;
  struct stat found;
  const bool was_there = ::fstatat(at.folder, at.name, &found, at.at_flags) == 0;
  const int descriptor = ::openat(at.folder, at.name, flags, mode);
  if (descriptor >= 0 && !was_there) names_.push_back({Naming::create, {}, std::move(place), nullptr});
  return descriptor;
}

int64_t PowerCut::write(int descriptor, const void* from, size_t bytes, int64_t offset) {
  std::lock_guard lock(mutex_);
  Changed* const file = changed(descriptor);
  if (file == nullptr) return -1;
  const int64_t before = size_of(file->file->get());
  std::string replaced(size_t(std::clamp<int64_t>(before - offset, 0, int64_t(bytes))), 0);
  if (!read_all(file->file->get(), &replaced, offset)) return -1;
  const ssize_t moved = ::pwrite(descriptor, from, bytes, offset);
  if (moved <= 0) return moved;
  replaced.resize(std::min(replaced.size(), size_t(moved)));
  file->changes.push_back({false, offset, moved, before, std::move(replaced)});
  return moved;
}

int PowerCut::truncate(int descriptor, int64_t bytes) {
  std::lock_guard lock(mutex_);
  Changed* const file = changed(descriptor);
  if (file == nullptr || bytes < 0) return ::ftruncate(descriptor, bytes);
  note_truncate(file, bytes);
  const int result = ::ftruncate(descriptor, bytes);
  if (result != 0) file->changes.pop_back();
  return result;
}

int PowerCut::sync(int descriptor) {
  std::lock_guard lock(mutex_);
  if (::fdatasync(descriptor) != 0) return -1;
  Identity identity;
  if (identify(descriptor, &identity))
    std::erase_if(files_, [&](const Changed& file) { return file.identity == identity; });
  return 0;
}

int PowerCut::rename(const NameAt& from, const NameAt& to) {
  std::lock_guard lock(mutex_);
  NameChange change{Naming::rename, {}, {}, nullptr};
  if (!place_of(from, &change.from) || !place_of(to, &change.to)) return -1;
  const int target = ::openat(to.folder, to.name, O_RDWR | O_CLOEXEC | to.open_flags);
  if (target >= 0) change.replaced = std::make_shared<Descriptor>(target);
  if (::renameat(from.folder, from.name, to.folder, to.name) != 0) return -1;
  names_.push_back(std::move(change));
  return 0;
}

int PowerCut::link(const NameAt& from, const NameAt& to) {
  std::lock_guard lock(mutex_);
  NameChange change{Naming::create, {}, {}, nullptr};
  if (!place_of(to, &change.to) || ::linkat(from.folder, from.name, to.folder, to.name, 0) != 0) return -1;
  names_.push_back(std::move(change));
  return 0;
}

int PowerCut::remove(const NameAt& at) {
  std::lock_guard lock(mutex_);
  NameChange change{Naming::remove, {}, {}, nullptr};
  if (!place_of(at, &change.to)) return -1;
  const int gone = ::openat(at.folder, at.name, O_RDWR | O_CLOEXEC | at.open_flags);
  if (gone >= 0) change.replaced = std::make_shared<Descriptor>(gone);
  if (::unlinkat(at.folder, at.name, 0) != 0) return -1;
  names_.push_back(std::move(change));
  return 0;
}

int PowerCut::make_directory(const NameAt& at, unsigned mode) {
  std::lock_guard lock(mutex_);
  NameChange change{Naming::create, {}, {}, nullptr};
  if (!place_of(at, &change.to) || ::mkdirat(at.folder, at.name, mode) != 0) return -1;
  names_.push_back(std::move(change));
  return 0;
}

int PowerCut::sync_directory(int descriptor) {
  std::lock_guard lock(mutex_);
  if (::fsync(descriptor) != 0) return -1;
  Identity identity;
  if (!identify(descriptor, &identity)) return 0;
  std::vector<bool> durable(names_.size());
  for (size_t i = names_.size(); i-- > 0;) {
    if (names_[i].to.directory_identity == identity) durable[i] = true;
    if (!durable[i] || names_[i].kind != Naming::rename) continue;
    // What it was called in another directory before no longer matters.
    if (const int64_t earlier = named_by(names_[i].from, i); earlier >= 0) durable[size_t(earlier)] = true;
  }
  std::vector<NameChange> left;
  for (size_t i = 0; i < names_.size(); ++i)
    if (!durable[i]) left.push_back(std::move(names_[i]));
  names_ = std::move(left);
  return 0;
}

int64_t PowerCut::named_by(const Place& place, size_t before) const {
  for (size_t i = before; i-- > 0;)
    if (names_[i].kind != Naming::remove && names_[i].to == place) return int64_t(i);
  return -1;
}

Status PowerCut::cut(uint64_t seed) {
  std::lock_guard lock(mutex_);
  Random random{seed};
  Status status;
  random.choose_share();
  for (const Changed& file : files_)
    if (status.ok()) status = cut_data(file, &random);
  random.choose_share();
  if (status.ok()) status = cut_names(&random);
  forget();
  return status;
}

// All is undone, the last change first, and what stays is made anew.
Status PowerCut::cut_data(const Changed& file, Random* random) {
  const int descriptor = file.file->get();
  const std::vector<Change>& changes = file.changes;
  std::vector<std::string> wrote(changes.size());
  for (size_t i = changes.size(); i-- > 0;) {
    const Change& change = changes[i];
    if (!change.truncates) {
      wrote[i].resize(size_t(change.bytes));
      if (!read_all(descriptor, &wrote[i], change.offset)) return cut_failed("what was written cannot be read");
    }
    if (!write_all(descriptor, change.replaced.data(), int64_t(change.replaced.size()), change.offset) ||
        ::ftruncate(descriptor, change.size_before) != 0)
      return cut_failed("what was replaced cannot be put back");
  }
  for (size_t i = 0; i < changes.size(); ++i) {
    const Change& change = changes[i];
    if (change.truncates) {
      if (random->keeps() && ::ftruncate(descriptor, change.offset) != 0)
        return cut_failed("a truncate cannot be repeated");
      continue;
    }
    const bool whole = random->next() % 2 == 0;
    const bool all = random->keeps();
    const int64_t end = change.offset + int64_t(wrote[i].size());
    // Adjacent sectors that stay are one write.
    for (int64_t at = change.offset, from = at; at < end; from = at) {
      bool stays = true;
      while (at < end && (stays = whole ? all : random->keeps())) at = std::min(end, (at / kSector + 1) * kSector);
      if (!write_all(descriptor, wrote[i].data() + (from - change.offset), at - from, from))
        return cut_failed("a write cannot be repeated");
      if (!stays) at = std::min(end, (at / kSector + 1) * kSector);
    }
  }
  return {};
}

Status PowerCut::restore(const Place& place, const Descriptor& content) {
  const int file = ::openat(place.directory->get(), place.name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  // Its directory may be gone, with all that was in it.
  if (file < 0) return errno == ENOENT ? Status() : cut_failed(place.name + " cannot be put back");
  const Descriptor closes(file);
  const int64_t size = size_of(content.get());
  std::string piece;
  for (int64_t at = 0; at < size; at += int64_t(piece.size())) {
    piece.resize(size_t(std::min<int64_t>(size - at, int64_t{1} << 20)));
    if (!read_all(content.get(), &piece, at) || piece.empty() ||
        !write_all(file, piece.data(), int64_t(piece.size()), at))
      return cut_failed(place.name + " cannot be put back");
  }
  return {};
}

Status PowerCut::cut_names(Random* random) {
  std::vector<bool> stays(names_.size());
  for (size_t i = 0; i < names_.size(); ++i) stays[i] = random->keeps();
  for (size_t i = names_.size(); i-- > 0;) {
    if (!stays[i] || names_[i].kind != Naming::rename) continue;
    if (const int64_t earlier = named_by(names_[i].from, i); earlier >= 0) stays[size_t(earlier)] = true;
  }
  const auto aside = [&](size_t i) { return names_[i].to.name + ".cut-" + std::to_string(i); };
  const auto move = [](const Place& from, const std::string& from_name, const Place& to, const std::string& to_name) {
    // Not there: its directory is gone, or the file by another way than the door.
    return ::renameat(from.directory->get(), from_name.c_str(), to.directory->get(), to_name.c_str()) == 0 ||
           errno == ENOENT;
  };
  for (size_t i = names_.size(); i-- > 0;) {
    const auto& [kind, from, to, replaced] = names_[i];
    if (kind == Naming::rename && !move(to, to.name, from, from.name)) return cut_failed(to.name + " cannot be moved");
    if (kind == Naming::create && !move(to, to.name, to, aside(i))) return cut_failed(to.name + " cannot be moved");
    if (kind == Naming::create && !stays[i]) {
      std::error_code failed;
      std::filesystem::remove_all("/proc/self/fd/" + std::to_string(to.directory->get()) + "/" + aside(i), failed);
    }
    if (replaced == nullptr) continue;
    if (Status status = restore(to, *replaced); !status.ok()) return status;
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!stays[i]) continue;
    const auto& [kind, from, to, replaced] = names_[i];
    if (kind == Naming::rename && !move(from, from.name, to, to.name))
      return cut_failed(from.name + " cannot be moved");
    if (kind == Naming::create && !move(to, aside(i), to, to.name)) return cut_failed(to.name + " cannot be moved");
    if (kind == Naming::remove) ::unlinkat(to.directory->get(), to.name.c_str(), 0);
  }
  return {};
}

}  // namespace shoal
