#include "base/owned_directory.h"

#include <signal.h>
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

void a_directory_has_one_owner() {
  const std::string path = folder() + "/owned/deep";
  OwnedDirectory directory;
  CHECK(OwnedDirectory::take(path, &directory).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    OwnedDirectory other;
    const Status status = OwnedDirectory::take(path, &other);
    std::_Exit(says(status, "owned/deep/LOCK] wanted it for this process alone; process " +
                                std::to_string(::getppid()) +
                                " has it. End that one, or name another directory in Ssd(path=)")
                   ? 0
                   : 1);
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

void every_step_of_taking_it_can_fail_and_is_told() {
  const std::string path = folder() + "/refused/deep";
  struct Case {
    FileCall call;
    int64_t after;
    const char* words;
  };
  for (const Case& step : {
           Case{FileCall::make_directory, 0, "/refused/deep] the directory could not be made: "},
           Case{FileCall::open, 0, "/refused/deep/LOCK] could not be opened: "},
           Case{FileCall::lock, 0, "/refused/deep/LOCK] could not be locked: "},
           Case{FileCall::lock, 1, "/refused/deep/LOCK] could not be written: "},
           Case{FileCall::list, 0, "/refused/deep] the directory could not be read: "},
           Case{FileCall::remove, 0, "/refused/deep/000.seg] could not be removed: "},
       }) {
    for (const auto& [error, todo] : {std::pair{EACCES, "Permission denied (errno 13). Make it writable"},
                                      std::pair{ENOSPC, "No space left on device (errno 28). Free space"},
                                      std::pair{EIO, "Input/output error (errno 5). The disk reported"}}) {
      if (step.call == FileCall::remove) {
        std::filesystem::create_directories(path);
        std::ofstream(path + "/000.seg") << "old";
      }
      OwnedDirectory directory;
      Faults::instance().inject({step.call, "/refused/deep", error, step.after, 1});
      const Status status = OwnedDirectory::take(path, &directory);
      CHECK(says(status, std::string(step.words) + todo) && directory.path().empty(), status.message());
      Faults::instance().clear();
      const Status again = OwnedDirectory::take(path, &directory);
      CHECK(again.ok(), again.message());
    }
  }
}

void what_cannot_be_removed_stays_for_the_next_owner() {
  const std::string path = folder() + "/stays";
  OwnedDirectory directory;
  CHECK(OwnedDirectory::take(path, &directory).ok());
  std::ofstream(path + "/000.seg") << "rows";
  Faults::instance().inject({FileCall::remove, "000.seg", EIO, 0, 1});
  directory.release();
  CHECK(std::filesystem::exists(path + "/000.seg") && !std::filesystem::exists(path + "/LOCK"));
  CHECK(OwnedDirectory::take(path, &directory).ok());
  CHECK(!std::filesystem::exists(path + "/000.seg"));
}

void the_last_one_takes_the_directory_above_along_if_it_was_made_for_them() {
  const std::string own = folder() + "/own", above = own + "/collection";
  OwnedDirectory first, second;
  CHECK(OwnedDirectory::take(above + "/a", &first).ok() && OwnedDirectory::take(above + "/b", &second).ok());
  first.release();  // which made it
  CHECK(std::filesystem::exists(above));
  second.release();
  CHECK(!std::filesystem::exists(above) && std::filesystem::exists(own));
  // One that has something else in it stays, and so does one that was there.
  CHECK(OwnedDirectory::take(above + "/a", &first).ok());
  std::ofstream(above + "/notes.txt") << "mine";
  first.release();
  CHECK(std::filesystem::exists(above + "/notes.txt") && !std::filesystem::exists(above + "/a"));
  CHECK(OwnedDirectory::take(own + "/a/", &first).ok());
  first.release();
  CHECK(std::filesystem::exists(own) && !std::filesystem::exists(own + "/a"));
}

// As a worker of a data loader lives on where its parent was killed.
void a_forked_child_neither_keeps_nor_removes_it() {
  const std::string path = folder() + "/forked";
  int owner_is[2], worker_is[2];
  CHECK(::pipe(owner_is) == 0 && ::pipe(worker_is) == 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    OwnedDirectory directory;
    CHECK(OwnedDirectory::take(path, &directory).ok());
    std::ofstream(path + "/000.seg") << "rows";
    const pid_t worker = ::fork();
    if (worker == 0) {
      directory.release();
      CHECK(std::filesystem::exists(path + "/000.seg"));
      char byte;
      CHECK(::write(worker_is[1], "y", 1) == 1);
      ::close(owner_is[1]);
      CHECK(::read(owner_is[0], &byte, 1) == 0);  // until the test is done
      std::_Exit(0);
    }
    ::pause();
  }
  char byte = 0;
  CHECK(::read(worker_is[0], &byte, 1) == 1 && byte == 'y');
  OwnedDirectory directory;
  const Status status = OwnedDirectory::take(path, &directory);
  CHECK(says(status, "process " + std::to_string(owner) + " has it"), status.message());
  CHECK(::kill(owner, SIGKILL) == 0 && ::waitpid(owner, nullptr, 0) == owner);
  const Status taken = OwnedDirectory::take(path, &directory);
  CHECK(taken.ok(), taken.message());
  CHECK(!std::filesystem::exists(path + "/000.seg"));
  ::close(owner_is[1]);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::folder();  // made here: a child's would stay
  shoal::a_forked_child_neither_keeps_nor_removes_it();
  shoal::a_directory_has_one_owner();
  shoal::what_a_dead_owner_left_is_removed_and_nothing_else();
  shoal::a_directory_that_cannot_be_written_says_so();
  shoal::every_step_of_taking_it_can_fail_and_is_told();
  shoal::what_cannot_be_removed_stays_for_the_next_owner();
  shoal::the_last_one_takes_the_directory_above_along_if_it_was_made_for_them();
}
