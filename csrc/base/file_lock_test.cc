#include "base/file_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

Status take(const std::string& path, FileLock* lock) { return FileLock::take(path, "log", FileOwner::log, lock); }

bool is_told(const Status& status, const std::string& words) {
  return status.code() == Code::storage && status.message().find(words) != std::string::npos;
}

std::string content_of(const std::string& path) {
  std::string line;
  std::getline(std::ifstream(path) >> std::ws, line);
  return line;
}

// What the body returns, in a child.
template <typename Body>
bool child_says(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) std::_Exit(body() ? 0 : 1);
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child);
  return how == 0;
}

void one_at_a_time_has_it_and_others_are_told_who() {
  const std::string path = folder() + "/LOCK";
  const std::string process = "process " + std::to_string(::getpid()) + " (log) has it";
  FileLock lock;
  CHECK(take(path, &lock).ok() && lock.is_held());
  CHECK(content_of(path) == std::to_string(::getpid()) + " log", content_of(path));
  FileLock second;
  Status status = take(path, &second);
  CHECK(is_told(status, process + ", which is this one. Close what has it here, or choose another"), status.message());
  CHECK(!second.is_held());
  CHECK(child_says([&] {
    FileLock other;
    return is_told(take(path, &other), process + ". End that one, or choose another directory.");
  }));
  FileLock moved = std::move(lock);
  CHECK(moved.is_held() && !lock.is_held() && is_told(take(path, &second), process));
  moved.release();
  CHECK(std::filesystem::exists(path) && std::filesystem::file_size(path) == 0);
  CHECK(take(path, &second).ok());
}

void a_killed_process_has_it_no_more() {
  const std::string path = folder() + "/KILLED";
  int ready[2];
  CHECK(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    FileLock lock;
    const char took = take(path, &lock).ok() ? 'y' : 'n';
    if (::write(ready[1], &took, 1) == 1) ::pause();
    std::_Exit(1);
  }
  char took = 0;
  CHECK(::read(ready[0], &took, 1) == 1 && took == 'y');
  FileLock lock;
  const Status status = take(path, &lock);
  CHECK(is_told(status, "process " + std::to_string(child) + " (log)"), status.message());
  CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, nullptr, 0) == child);
  CHECK(take(path, &lock).ok());
}

void a_forked_child_neither_holds_nor_releases_it() {
  const std::string path = folder() + "/FORKED";
  int gone[2];
  CHECK(::pipe(gone) == 0);
  FileLock lock;
  CHECK(take(path, &lock).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    // Whatever has the descriptor's number now is not closed by the lock's end.
    const int other = ::dup(gone[0]);
    const bool held = lock.is_held();
    lock.release();
    char byte;
    const bool waited = ::read(other, &byte, 1) == 1;  // until the parent has let go
    std::_Exit(waited && !held ? 0 : 1);
  }
  CHECK(lock.is_held());
  FileLock second;
  CHECK(!take(path, &second).ok());  // the child's release was none
  lock.release();
  CHECK(take(path, &second).ok());  // while the child lives
  CHECK(::write(gone[1], "x", 1) == 1);
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child && how == 0, how);
}

void what_stands_in_the_file_is_not_trusted() {
  const std::string path = folder() + "/ODD";
  for (const std::string& content :
       {std::string("\x01\xff%s\n"), std::string(100, '7'), std::string(1 << 20, 'x'), std::string("12 \x1b[31m")}) {
    std::ofstream(path, std::ios::trunc) << content;
    FileLock lock;
    CHECK(take(path, &lock).ok());
    std::ofstream(path, std::ios::trunc) << content;  // over that one's number
    FileLock second;
    const Status status = take(path, &second);
    CHECK(is_told(status, content[0] == '1' ? "; process 12 has it" : "; another process has it"), status.message());
  }
}

void one_that_was_removed_is_no_lock() {
  const std::string path = folder() + "/REMOVED";
  FileLock first, second, third;
  CHECK(take(path, &first).ok());
  CHECK(first.is_in_place() && !second.is_in_place());
  std::filesystem::remove(path);
  CHECK(first.is_held() && !first.is_in_place());
  CHECK(take(path, &second).ok());
  CHECK(!first.is_in_place() && second.is_in_place());
  first.release();
  CHECK(!take(path, &third).ok());
}

void a_place_that_is_not_there_is_told() {
  FileLock lock;
  CHECK(is_told(take(folder() + "/no/LOCK", &lock), "could not be opened: No such file"));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::one_at_a_time_has_it_and_others_are_told_who();
  shoal::a_killed_process_has_it_no_more();
  shoal::a_forked_child_neither_holds_nor_releases_it();
  shoal::what_stands_in_the_file_is_not_trusted();
  shoal::one_that_was_removed_is_no_lock();
  shoal::a_place_that_is_not_there_is_told();
}
