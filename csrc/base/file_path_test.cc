// Of paths, and of every call of the door where something else than a file or a folder stands below the root.
#include "base/file_path.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "base/check.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/file_reader.h"
#include "base/file_writer.h"
#include "base/folder_test.h"
#include "base/owned_directory.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;
constexpr FileOwner kLog = FileOwner::log;

bool says(const Status& status, const std::string& words) {
  return status.code() == Code::storage && status.message().find(words) != std::string::npos;
}

// Names, kinds, times and bytes of all that is in a folder.
std::string told(const std::string& path) {
  std::ostringstream all;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    struct stat found;
    CHECK(::lstat(entry.path().c_str(), &found) == 0);
    all << entry.path() << " " << found.st_mode << " " << found.st_size << " " << found.st_mtim.tv_sec << "."
        << found.st_mtim.tv_nsec << "\n";
    if (entry.is_regular_file()) all << std::ifstream(entry.path()).rdbuf();
  }
  return all.str();
}

void names_are_of_either_part() {
  const FilePath named("/data/log/");
  CHECK(named.string() == "/data/log/" && named.name() == "log" && named.parent().string() == "/data");
  const FilePath below = named / "segments" / "1.seg";
  CHECK(below.string() == "/data/log/segments/1.seg" && below.root() == "/data/log/" && below.name() == "1.seg");
  CHECK(below.parent() == named / "segments" && below.parent().parent() == named, below.parent().string());
  CHECK(below.with_name("2") == named / "segments/2" && !(below == FilePath(below.string())));
  CHECK(FilePath("log").parent().string() == "." && FilePath("/log").parent().string() == "/");
  CHECK((FilePath(".") / "rank").string() == "rank" && (FilePath("/") / "rank").string() == "/rank");
  CHECK(FilePath("/").name().empty() && FilePath("x").name() == "x");
}

void names_that_lead_up_are_refused() {
  const std::string root = folder() + "/up";
  CHECK(make_directories(root + "/inside", FileOwner::log).ok());
  std::ofstream(folder() + "/above") << "x";
  for (const std::string name : {"../above", "inside/../../above", "..", ".", "inside/", "/etc/passwd"}) {
    File file;
    CHECK(says(File::open_to_read(FilePath(root, name), false, kLog, &file), "Invalid argument"), name);
  }
}

// Each call of the door on a path, as its answer.
struct Call {
  const char* name;
  std::function<Status(const FilePath&)> make;
  bool is_of_folder = false;
  bool removes = false;  // or gives a name, where what stands there goes itself
};

std::vector<Call> all_calls() {
  return {
      {"create",
       [](const FilePath& path) {
         File made;
         return File::create(path, false, &made, kLog);
       }},
      {"create_new",
       [](const FilePath& path) {
         File made;
         return File::create_new(path, false, kLog, &made);
       }},
      {"open_to_write",
       [](const FilePath& path) {
         File made;
         return File::open_to_write(path, false, kLog, &made);
       }},
      {"open_to_read",
       [](const FilePath& path) {
         File made;
         return File::open_to_read(path, false, kLog, &made);
       }},
      {"read",
       [](const FilePath& path) {
         std::unique_ptr<FileReader> made;
         return FileReader::open(path, true, kLog, &made);
       }},
      {"write",
       [](const FilePath& path) {
         std::unique_ptr<FileWriter> made;
         return FileWriter::create(path, true, kLog, &made);
       }},
      {"lock",
       [](const FilePath& path) {
         FileLock made;
         return FileLock::take(path, "log", kLog, &made);
       }},
      {"size",
       [](const FilePath& path) {
         std::optional<int64_t> bytes;
         return file_size(path, kLog, &bytes);
       }},
      {"list",
       [](const FilePath& path) {
         std::vector<std::string> names;
         return list_directory(path, kLog, &names);
       },
       true},
      {"sync", [](const FilePath& path) { return sync_directory(path, kLog); }, true},
      {"make", [](const FilePath& path) { return make_directories(path, kLog); }, true},
      {"own",
       [](const FilePath& path) {
         OwnedDirectory made;
         return OwnedDirectory::take(path, &made);
       },
       true},
      {"remove_directory", [](const FilePath& path) { return remove_directory(path, kLog); }, true},
      {"remove", [](const FilePath& path) { return remove_file(path, kLog); }, false, true},
      {"rename", [](const FilePath& path) { return rename_file(path, path.with_name("to"), kLog); }, false, true},
      {"rename_to",
       [](const FilePath& path) {
         File made;
         if (Status status = File::create(path.with_name("from"), false, &made, kLog); !status.ok()) return status;
         return rename_file(path.with_name("from"), path, kLog);
       },
       false, true},
      {"link",
       [](const FilePath& path) {
         bool made;
         return link_file(path, path.with_name("second"), kLog, &made);
       },
       false, true},
  };
}

// What may stand where a file or a folder should: by name, with what errors call it.
struct Shape {
  std::string told;
  std::function<void(const std::string&)> make;
};

void make_socket(const std::string& path) {
  const int made = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  CHECK(path.size() < sizeof address.sun_path);
  std::memcpy(address.sun_path, path.c_str(), path.size());
  CHECK(::bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  ::close(made);
}

std::vector<Shape> all_shapes(const std::string& outside) {
  const auto link_to = [](const std::string& target) {
    return [target](const std::string& path) { CHECK(::symlink(target.c_str(), path.c_str()) == 0); };
  };
  std::vector<Shape> shapes = {
      {"a link to '" + outside + "/file'", link_to(outside + "/file")},
      {"a link to '" + outside + "/folder'", link_to(outside + "/folder")},
      {"a link to 'itself'", link_to("itself")},
      {"a link to '" + outside + "/none'", link_to(outside + "/none")},
      {"a pipe", [](const std::string& path) { CHECK(::mkfifo(path.c_str(), 0600) == 0); }},
      {"a socket", make_socket},
  };
  // Which only root can make, and not everywhere.
  if (const std::string probe = folder() + "/device"; ::mknod(probe.c_str(), S_IFCHR | 0600, makedev(1, 5)) == 0) {
    shapes.push_back({"a device", [](const std::string& path) {
                        CHECK(::mknod(path.c_str(), S_IFCHR | 0600, makedev(1, 5)) == 0);
                      }});
  }
  return shapes;
}

void no_call_follows_what_stands_below_the_root() {
  const std::string outside = folder() + "/outside";
  fs::create_directories(outside + "/folder");
  std::ofstream(outside + "/file") << "precious";
  std::ofstream(outside + "/folder/1.seg") << "precious";
  const std::string before = told(outside);
  for (const Shape& shape : all_shapes(outside)) {
    for (const Call& call : all_calls()) {
      const std::string root = folder() + "/root";
      fs::remove_all(root);
      fs::create_directories(root + "/inside");
      const std::string name = shape.told == "a link to 'itself'" ? "itself" : "name";
      // As the last name, and as a folder on the way there.
      shape.make(root + "/inside/" + name);
      const Status at = call.make(FilePath(root, "inside/" + name));
      if (call.removes) {
        CHECK(at.ok() || says(at, root), call.name, shape.told, at.message());
      } else if (std::string(call.name) == "create_new" || std::string(call.name) == "write") {
        CHECK(says(at, name + "] "), call.name, shape.told, at.message());
      } else {
        CHECK(says(at, name + "] wanted a " + (call.is_of_folder ? "folder" : "file") + "; got " + shape.told),
              call.name, shape.told, at.message());
      }
      fs::remove(root + "/inside/" + name);
      shape.make(root + "/inside/" + name);
      const Status below = call.make(FilePath(root, "inside/" + name + "/1.seg"));
      CHECK(says(below, "inside/" + name + "] wanted a folder; got " + shape.told), call.name, shape.told,
            below.message());
      CHECK(told(outside) == before, call.name, shape.told);
    }
  }
}

void links_above_and_at_the_root_lead_on() {
  const std::string real = folder() + "/real";
  fs::create_directories(real + "/log");
  fs::create_symlink(real, folder() + "/linked");
  fs::create_symlink(real + "/log", folder() + "/log-itself");
  for (const std::string& root : {folder() + "/linked/log", folder() + "/log-itself"}) {
    File file;
    CHECK(make_directories(FilePath(root) / "segments", kLog).ok());
    CHECK(File::open_to_write(FilePath(root) / "segments" / "1.seg", false, kLog, &file).ok());
    CHECK(file.is_in_place() && file.write("x", 1, 0).ok() && sync_directory(FilePath(root), kLog).ok());
  }
  CHECK(fs::file_size(real + "/log/segments/1.seg") == 1);
  std::optional<FileEntry> entry;
  CHECK(look_at(folder() + "/log-itself", kLog, &entry).ok() && entry->kind == FileKind::folder);
  CHECK(look_at(FilePath(folder(), "log-itself"), kLog, &entry).ok() && entry->kind == FileKind::link);
  CHECK(entry->owner == ::geteuid() && look_at(FilePath(folder(), "none"), kLog, &entry).ok() && !entry.has_value());
}

void a_folder_where_a_file_belongs_is_told_and_the_other_way_round() {
  const FilePath root(folder() + "/kinds");
  CHECK(make_directories(root / "folder", kLog).ok());
  std::ofstream((root / "file").string()) << "x";
  for (const Call& call : all_calls()) {
    if (call.removes || std::string(call.name) == "remove_directory") continue;
    const Status status = call.make(root / (call.is_of_folder ? "file" : "folder"));
    CHECK(status.code() == Code::storage && status.message().find(root.string()) != std::string::npos, call.name);
  }
  CHECK(says(remove_file(root / "folder", kLog), "wanted a file; got a directory"));
  CHECK(says(remove_directory(root / "file", kLog), "wanted a folder; got a file"));
}

void holes_are_passed_over() {
  File file;
  CHECK(File::create_new(folder() + "/sparse", false, kLog, &file).ok());
  CHECK(file.write("x", 1, 0).ok() && file.write("y", 1, int64_t{3} << 30).ok() &&
        file.truncate(int64_t{8} << 30).ok());
  int64_t at = 0;
  CHECK(file.next_data(0, &at).ok() && at == 0, at);
  CHECK(file.next_data(1 << 20, &at).ok() && at > (1 << 20) && at <= (int64_t{3} << 30), at);
  CHECK(file.next_data((int64_t{3} << 30) + (1 << 20), &at).ok() && at <= (int64_t{8} << 30), at);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::names_are_of_either_part();
  shoal::names_that_lead_up_are_refused();
  shoal::no_call_follows_what_stands_below_the_root();
  shoal::links_above_and_at_the_root_lead_on();
  shoal::a_folder_where_a_file_belongs_is_told_and_the_other_way_round();
  shoal::holes_are_passed_over();
}
