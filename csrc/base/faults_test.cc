#include "base/faults.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "base/file_writer.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

constexpr FileOwner kLog = FileOwner::log;
constexpr uint64_t kSeeds = 60;

// A directory with nothing in it, recorded from now on.
std::string begin() {
  static int number = 0;
  const std::string path = folder() + "/cut" + std::to_string(number++);
  std::filesystem::create_directory(path);
  PowerCut::instance().record(path);
  return path;
}

void cut(uint64_t seed) {
  const Status status = PowerCut::instance().cut(seed);
  CHECK(status.ok(), status.message());
}

File open(const std::string& path) {
  File file;
  const Status status = File::open_to_write(path, false, kLog, &file);
  CHECK(status.ok(), status.message());
  return file;
}

void write(const File& file, const std::string& bytes, int64_t offset = 0) {
  CHECK(file.write(bytes.data(), int64_t(bytes.size()), offset).ok());
}

void sync(const std::string& directory) { CHECK(sync_directory(directory, kLog).ok()); }

// A file with this in it, of which all is durable.
File durable(const std::string& path, const std::string& bytes) {
  File file = open(path);
  write(file, bytes);
  CHECK(file.sync().ok());
  sync(std::filesystem::path(path).parent_path());
  return file;
}

bool is_there(const std::string& path) { return std::filesystem::exists(path); }

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// All files below it, by name.
std::map<std::string, std::string> files_in(const std::string& path) {
  std::map<std::string, std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    const std::string name = std::filesystem::relative(entry.path(), path);
    found[name] = entry.is_directory() ? "/" : content_of(entry.path());
  }
  return found;
}

void what_was_synced_survives() {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    durable(path + "/a", std::string(3000, 'a'));
    durable(path + "/b", "b");
    CHECK(rename_file(path + "/b", path + "/c", kLog).ok());
    CHECK(make_directories(path + "/d/e", kLog).ok());
    durable(path + "/d/e/f", "f");
    durable(path + "/gone", "x");
    CHECK(remove_file(path + "/gone", kLog).ok());
    sync(path);
    cut(seed);
    const auto files = files_in(path);
    CHECK((files ==
           std::map<std::string, std::string>{
               {"a", std::string(3000, 'a')}, {"c", "b"}, {"d", "/"}, {"d/e", "/"}, {"d/e/f", "f"}}),
          seed, files.size());
  }
}

void any_sectors_of_a_write_are_lost() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 4 * kSeeds; ++seed) {
    const std::string path = begin() + "/a";
    const File file = durable(path, std::string(2000, 'o'));
    write(file, std::string(1000, 'n'), 700);
    cut(seed);
    const std::string left = content_of(path);
    CHECK(left.size() == 2000, left.size());
    std::string pieces;
    const int64_t ends[] = {0, 700, 1024, 1536, 1700, 2000};  // 512-byte sectors of the file, as the write has them
    for (int i = 0; i < 5; ++i) {
      const std::string piece = left.substr(size_t(ends[i]), size_t(ends[i + 1] - ends[i]));
      CHECK(piece == std::string(piece.size(), piece[0]), seed, i);
      pieces += piece[0];
    }
    CHECK(pieces[0] == 'o' && pieces[4] == 'o', pieces);
    seen.insert(pieces);
  }
  CHECK(seen.size() == 8, seen.size());
}

void of_several_writes_any_may_be_the_last() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin() + "/a";
    const File file = durable(path, "0");
    write(file, "1");
    write(file, "2");
    write(file, "3", 1000);
    cut(seed);
    const std::string left = content_of(path);
    CHECK(left.size() == 1 || (left.size() == 1001 && left.substr(1) == std::string(999, '\0') + "3"), left.size());
    seen.insert(left.substr(0, 1) + std::to_string(left.size()));
  }
  CHECK(seen.size() == 6, seen.size());
}

void a_truncate_is_taken_back_whole() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin() + "/a";
    const File file = durable(path, std::string(3000, 'o'));
    CHECK(file.truncate(100).ok());
    write(file, "n", 100);
    CHECK(file.truncate(200).ok());
    cut(seed);
    seen.insert(content_of(path));
  }
  const std::string old(3000, 'o'), head(100, 'o'), zeros(100, '\0');
  std::string written(100, '\0');
  written[0] = 'n';
  CHECK((seen == std::set<std::string>{old, head + "n" + old.substr(101), old.substr(0, 200),
                                       head + "n" + old.substr(0, 99), head, head + "n", head + zeros, head + written}),
        seen.size());
  // A file that is made anew, where there was one, is cut first.
  seen.clear();
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin() + "/a";
    durable(path, "old");
    File file;
    CHECK(File::create(path, false, &file, kLog).ok());
    write(file, "n");
    cut(seed);
    seen.insert(content_of(path));
  }
  CHECK((seen == std::set<std::string>{"old", "nld", "", "n"}), seen.size());
}

void a_new_file_needs_its_directory_synced() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    const File file = open(path + "/a");
    write(file, "data");
    CHECK(file.sync().ok());
    cut(seed);
    const auto files = files_in(path);
    CHECK(files.size() <= 1);
    seen.insert(files.empty() ? "none" : files.at("a"));
  }
  CHECK((seen == std::set<std::string>{"none", "data"}), seen.size());
}

void a_rename_leaves_the_old_or_the_new() {
  std::set<std::map<std::string, std::string>> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    durable(path + "/name", "old");
    durable(path + "/temporary", "new");
    CHECK(rename_file(path + "/temporary", path + "/name", kLog).ok());
    cut(seed);
    seen.insert(files_in(path));
  }
  CHECK((seen ==
         std::set<std::map<std::string, std::string>>{{{"name", "old"}, {"temporary", "new"}}, {{"name", "new"}}}),
        seen.size());
  // The whole of how a file is replaced, twice; and what becomes of it if the data is not synced first.
  for (const bool synced : {true, false}) {
    std::set<std::string> names;
    for (uint64_t seed = 0; seed < 4 * kSeeds; ++seed) {
      const std::string path = begin();
      durable(path + "/name", "old");
      for (const char* const text : {"one", "two"}) {
        const File file = open(path + "/temporary");
        write(file, text);
        if (synced) CHECK(file.sync().ok());
        CHECK(rename_file(path + "/temporary", path + "/name", kLog).ok());
      }
      cut(seed);
      CHECK(is_there(path + "/name"));
      names.insert(content_of(path + "/name"));
    }
    std::set<std::string> expected = {"old", "one", "two"};
    if (!synced) expected.insert("");
    CHECK(names == expected, synced, names.size());
  }
}

void a_removed_file_may_be_back() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    const File file = durable(path + "/a", std::string(300'000, 'o'));
    write(file, "n", 10);
    CHECK(remove_file(path + "/a", kLog).ok());
    cut(seed);
    if (!is_there(path + "/a")) {
      seen.insert("gone");
      continue;
    }
    const std::string left = content_of(path + "/a");
    CHECK(left.size() == 300'000 && std::count(left.begin(), left.end(), 'o') >= 299'999);
    seen.insert(left.substr(10, 1));
  }
  CHECK((seen == std::set<std::string>{"gone", "o", "n"}), seen.size());
}

void names_follow_their_directory() {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 2 * kSeeds; ++seed) {
    const std::string path = begin();
    CHECK(make_directories(path + "/before", kLog).ok());
    durable(path + "/before/a", "a");
    CHECK(rename_file(path + "/before", path + "/after", kLog).ok());
    const File file = open(path + "/after/b");
    CHECK(file.sync().ok());
    cut(seed);
    const auto files = files_in(path);
    const std::string name = is_there(path + "/after") ? "after" : "before";
    CHECK(files.at(name + "/a") == "a" && files.size() <= 3, seed, files.size());
    seen.insert(name + (files.count(name + "/b") != 0 ? " b" : ""));
  }
  CHECK(seen.size() == 4, seen.size());
  // Synced under its new name, it is so under the old one.
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    CHECK(make_directories(path + "/before", kLog).ok());
    open(path + "/before/a");
    CHECK(rename_file(path + "/before", path + "/after", kLog).ok());
    sync(path + "/after");
    cut(seed);
    CHECK(is_there(path + "/after/a") || is_there(path + "/before/a"), seed);
  }
}

void a_writer_is_recorded_too() {
  const std::string bytes(9'000'001, 'w');
  bool lost_some = false;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::string path = begin();
    std::unique_ptr<FileWriter> writer;
    CHECK(FileWriter::create(path + "/whole", true, kLog, &writer).ok());
    CHECK(writer->append(bytes.data(), int64_t(bytes.size())).ok() && writer->finish().ok());
    std::unique_ptr<FileWriter> other;
    CHECK(FileWriter::create(path + "/part", true, kLog, &other).ok());
    CHECK(other->append(bytes.data(), int64_t(bytes.size())).ok());
    sync(path);
    // What its thread has not begun to write cannot be lost.
    for (int i = 0; i < 1000 && std::filesystem::file_size(path + "/part") < 8 << 20; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    other->abandon();
    cut(seed);
    CHECK(content_of(path + "/whole") == bytes, seed);
    const std::string part = content_of(path + "/part");
    CHECK(part.size() <= 8 << 20 && part.find_first_not_of(std::string("w\0", 2)) == std::string::npos, part.size());
    lost_some = lost_some || part.find('\0') != std::string::npos;
  }
  CHECK(lost_some);
}

void the_same_seed_leaves_the_same() {
  std::set<std::map<std::string, std::string>> seen;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::map<std::string, std::string> first;
    for (int time = 0; time < 2; ++time) {
      const std::string path = begin();
      Random random(seed);
      for (int i = 0; i < 40; ++i) {
        const std::string name = path + "/" + std::to_string(random.below(5));
        const int64_t kind = random.below(8);
        if (kind == 0) CHECK(remove_file(name, kLog).ok());
        if (kind == 1) sync(path);
        if (kind == 2 && is_there(name))
          CHECK(rename_file(name, path + "/" + std::to_string(random.below(5)), kLog).ok());
        if (kind < 3) continue;
        const File file = open(name);
        write(file, std::string(size_t(random.below(4000)), char('a' + i % 26)), random.below(3000));
        if (kind == 3) CHECK(file.sync().ok());
        if (kind == 4) CHECK(file.truncate(random.below(3000)).ok());
      }
      cut(seed);
      if (time == 0)
        first = files_in(path);
      else
        CHECK(files_in(path) == first, seed);
    }
    for (const auto& [name, content] : first) CHECK(name.size() == 1, name);  // nothing was left aside
    seen.insert(first);
  }
  CHECK(seen.size() == 10, seen.size());
}

void a_sync_that_fails_makes_nothing_durable() {
  bool lost = false;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::string path = begin();
    const File file = durable(path + "/a", "old");
    write(file, "new");
    Faults::instance().inject({FileCall::sync, path, 5, 0, 1});
    CHECK(!file.sync().ok());
    cut(seed);
    lost = lost || content_of(path + "/a") == "old";
  }
  Faults::instance().clear();
  CHECK(lost);
}

void nothing_else_is_touched() {
  const std::string path = begin();
  const File other = open(folder() + "/other");
  write(other, "other");
  PowerCut::instance().stop();
  const File file = open(path + "/a");
  write(file, "a");
  cut(0);
  CHECK(content_of(folder() + "/other") == "other" && content_of(path + "/a") == "a");
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_was_synced_survives();
  shoal::any_sectors_of_a_write_are_lost();
  shoal::of_several_writes_any_may_be_the_last();
  shoal::a_truncate_is_taken_back_whole();
  shoal::a_new_file_needs_its_directory_synced();
  shoal::a_rename_leaves_the_old_or_the_new();
  shoal::a_removed_file_may_be_back();
  shoal::names_follow_their_directory();
  shoal::a_writer_is_recorded_too();
  shoal::the_same_seed_leaves_the_same();
  shoal::a_sync_that_fails_makes_nothing_durable();
  shoal::nothing_else_is_touched();
}
