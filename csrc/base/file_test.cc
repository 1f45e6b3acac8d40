#include "base/file.h"

#include <sys/stat.h>
#include <sys/wait.h>
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

void a_directory_has_one_owner() {
  const std::string path = folder() + "/owned/deep";
  OwnedDirectory directory;
  CHECK(OwnedDirectory::take(path, &directory).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    OwnedDirectory other;
    const Status status = OwnedDirectory::take(path, &other);
    std::_Exit(says(status, "process " + std::to_string(::getppid()) + " has it") ? 0 : 1);
  }
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child && how == 0, how);
  directory.release();
  CHECK(!std::filesystem::exists(path));
  CHECK(OwnedDirectory::take(path, &directory).ok());
}

void what_a_dead_owner_left_is_removed_and_nothing_else() {
  const std::string path = folder() + "/left";
  std::filesystem::create_directories(path);
  std::ofstream(path + "/000.seg") << "old";
  std::ofstream(path + "/notes.txt") << "mine";
  OwnedDirectory directory;
  CHECK(OwnedDirectory::take(path, &directory).ok());
  CHECK(!std::filesystem::exists(path + "/000.seg") && std::filesystem::exists(path + "/notes.txt"));
  std::ofstream(path + "/001.seg") << "new";
  directory.release();
  CHECK(!std::filesystem::exists(path + "/001.seg") && std::filesystem::exists(path + "/notes.txt"));
}

void a_directory_that_cannot_be_written_says_so() {
  if (::geteuid() == 0) return;  // to whom all are open
  const std::string path = folder() + "/closed";
  std::filesystem::create_directories(path);
  ::chmod(path.c_str(), 0500);
  OwnedDirectory directory;
  CHECK(says(OwnedDirectory::take(path, &directory), "Make it writable"));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::errors_name_the_file_and_what_to_do();
  shoal::faults_come_after_and_as_often_as_they_should();
  shoal::a_directory_has_one_owner();
  shoal::what_a_dead_owner_left_is_removed_and_nothing_else();
  shoal::a_directory_that_cannot_be_written_says_so();
}
