#include "base/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

bool says(const Status& status, const std::string& words) {
  return status.code() == Code::storage && status.message().find(words) != std::string::npos;
}

void errors_name_the_file_and_what_to_do() {
  File file;
  const Status status = File::create(folder() + "/no/such/place.seg", true, &file);
  CHECK(says(status, "/no/such/place.seg] could not be made: No such file"), status.message());
  CHECK(says(status, "Ssd(path=)") && !file.is_open(), status.message());
}

void faults_come_after_and_as_often_as_they_should() {
  File file;
  CHECK(File::create(folder() + "/a.seg", false, &file).ok());
  char bytes[8] = {1};
  Faults::instance().inject({FileCall::write, "a.seg", EIO, 1, 1});
  CHECK(file.write(bytes, 8, 0).ok());
  CHECK(says(file.write(bytes, 8, 0), "writing 8 bytes at 0 failed: Input/output error"));
  CHECK(file.write(bytes, 8, 0).ok());
  Faults::instance().inject({FileCall::read, "other", EIO, 0, 1});
  CHECK(file.read(bytes, 8, 0).ok());
  Faults::instance().inject({FileCall::sync, "a.seg", EIO, 0, 1});
  CHECK(says(file.sync(), "could not be brought to the disk") && file.sync().ok());
  Faults::instance().clear();
}

void errors_fit_whose_file_it_is() {
  File file;
  const std::string path = folder() + "/owned_by";
  for (const FileOwner owner : {FileOwner::ssd, FileOwner::log}) {
    CHECK(File::open_to_write(path, false, owner, &file).ok());
    for (const int error : {ENOSPC, EIO, EACCES, ENOENT}) {
      Faults::instance().inject({FileCall::write, "owned_by", error, 0, 1});
      const Status status = file.write("x", 1, 0);
      CHECK(says(status, owner == FileOwner::ssd ? "Ssd(path=)" : " log"), status.message());
      CHECK((status.message().find("Ssd(") == std::string::npos) == (owner == FileOwner::log), status.message());
    }
    char byte;
    CHECK(says(file.read(&byte, 1, 5), "only 0 are there. The file was cut"));
    CHECK(says(file.read(&byte, 1, 5), owner == FileOwner::ssd ? "rows on it are lost" : "its log"));
  }
  Faults::instance().clear();
}

void files_are_opened_as_they_are_or_new() {
  const std::string path = folder() + "/modes";
  File file;
  CHECK(says(File::open_to_read(path, false, FileOwner::log, &file), "could not be opened: No such file"));
  CHECK(File::open_to_write(path, false, FileOwner::log, &file).ok());
  CHECK(file.write("abcdef", 6, 0).ok());
  CHECK(says(File::create_new(path, false, FileOwner::log, &file), "File exists") && file.is_open());
  File other;
  CHECK(File::open_to_write(path, false, FileOwner::log, &other).ok());
  int64_t bytes = 0;
  CHECK(other.size(&bytes).ok() && bytes == 6, bytes);
  CHECK(other.truncate(3).ok() && other.size(&bytes).ok() && bytes == 3 && other.sync().ok(), bytes);
  char text[8] = {};
  CHECK(File::open_to_read(path, false, FileOwner::log, &other).ok() && other.is_same(file) && other.is_in_place());
  CHECK(other.read_some(text, 8, 1, &bytes).ok() && bytes == 2 && std::string(text) == "bc", bytes, text);
  CHECK(says(other.write("x", 1, 0), "opened for reading only"));
  CHECK(says(other.truncate(-1), "could not be cut to -1 bytes"));
  CHECK(File::create_new(path + "2", false, FileOwner::log, &other).ok() && !other.is_same(file));
  other.close();
  CHECK(says(other.sync(), "It was closed"));
}

void only_files_are_opened() {
  const std::string pipe = folder() + "/pipe";
  CHECK(::mkfifo(pipe.c_str(), 0600) == 0);
  File file;
  CHECK(says(File::open_to_read(pipe, false, FileOwner::log, &file), "wanted a file; got a pipe"));
  CHECK(says(File::open_to_read("/dev/zero", false, FileOwner::log, &file), "a device"));
  CHECK(says(File::open_to_read(folder(), false, FileOwner::log, &file), "got a directory") && !file.is_open());
}

void the_end_within_a_block_is_met_by_direct_reads() {
  const std::string path = folder() + "/short";
  File file;
  CHECK(File::open_to_write(path, false, FileOwner::log, &file).ok());
  CHECK(file.write(std::string(5000, 'x').data(), 5000, 0).ok());
  CHECK(File::open_to_read(path, true, FileOwner::log, &file).ok());
  alignas(kBlockBytes) static char memory[4 * kBlockBytes];
  int64_t bytes = 0;
  CHECK(file.read_some(memory, sizeof memory, 0, &bytes).ok() && bytes == 5000, bytes);
  CHECK(says(file.read(memory, sizeof memory, 0), "only 5000 are there"));
}

void names_are_given_taken_and_listed() {
  const std::string path = folder() + "/names/deep//down";
  CHECK(make_directories(path, FileOwner::log).ok() && make_directories(path + "/", FileOwner::log).ok());
  File file;
  CHECK(File::create_new(path + "/b", false, FileOwner::log, &file).ok() && file.write("bb", 2, 0).ok());
  CHECK(File::create_new(path + "/a", false, FileOwner::log, &file).ok());
  std::vector<std::string> names;
  CHECK(list_directory(path, FileOwner::log, &names).ok() && names == std::vector<std::string>({"a", "b"}));
  CHECK(rename_file(path + "/b", path + "/a", FileOwner::log).ok() && sync_directory(path, FileOwner::log).ok());
  std::optional<int64_t> bytes;
  CHECK(file_size(path + "/a", FileOwner::log, &bytes).ok() && bytes == 2);
  CHECK(file_size(path + "/b", FileOwner::log, &bytes).ok() && !bytes.has_value());
  CHECK(remove_file(path + "/a", FileOwner::log).ok() && remove_file(path + "/a", FileOwner::log).ok());
  CHECK(list_directory(path, FileOwner::log, &names).ok() && names.empty());
  CHECK(says(list_directory(path + "/none", FileOwner::log, &names), "/none] the directory could not be read"));
  CHECK(says(rename_file(path + "/x", path + "/y", FileOwner::log), "/x] could not be renamed to "));
  CHECK(says(sync_directory(path + "/none", FileOwner::log), "the directory could not be brought to the disk"));
  std::ofstream(path + "/plain") << "x";
  CHECK(says(make_directories(path + "/plain/below", FileOwner::log), "Not a directory"));
  CHECK(says(make_directories(path + "/plain", FileOwner::log), "Not a directory"));
}

void every_call_can_be_made_to_fail() {
  const std::string path = folder() + "/faulty";
  CHECK(make_directories(path, FileOwner::log).ok());
  File file;
  CHECK(File::create_new(path + "/file", false, FileOwner::log, &file).ok());
  std::vector<std::string> names;
  std::optional<int64_t> there;
  int64_t bytes;
  const auto fails = [&](FileCall call, const auto& made) {
    Faults::instance().inject({call, "/faulty", EIO, 0, 1});
    const Status failed = made();
    CHECK(says(failed, "Input/output error"), int(call), failed.message());
    const Status again = made();
    CHECK(again.ok(), int(call), again.message());
  };
  fails(FileCall::truncate, [&] { return file.truncate(5); });
  fails(FileCall::size, [&] { return file.size(&bytes); });
  fails(FileCall::size, [&] { return file_size(path + "/file", FileOwner::log, &there); });
  fails(FileCall::list, [&] { return list_directory(path, FileOwner::log, &names); });
  fails(FileCall::sync_directory, [&] { return sync_directory(path, FileOwner::log); });
  fails(FileCall::make_directory, [&] { return make_directories(path + "/made", FileOwner::log); });
  fails(FileCall::rename, [&] { return rename_file(path + "/file", path + "/moved", FileOwner::log); });
  fails(FileCall::remove, [&] { return remove_file(path + "/moved", FileOwner::log); });
  // A directory whose name did not reach the disk is not taken for one that did.
  fails(FileCall::sync_directory, [&] { return make_directories(path + "/synced", FileOwner::log); });
  Faults::instance().clear();
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::errors_name_the_file_and_what_to_do();
  shoal::faults_come_after_and_as_often_as_they_should();
  shoal::errors_fit_whose_file_it_is();
  shoal::files_are_opened_as_they_are_or_new();
  shoal::only_files_are_opened();
  shoal::the_end_within_a_block_is_met_by_direct_reads();
  shoal::names_are_given_taken_and_listed();
  shoal::every_call_can_be_made_to_fail();
}
