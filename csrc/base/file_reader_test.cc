#include "base/file_reader.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kLength = 45 * kMiB + 1234;

const std::string& content() {
  static const std::string made = [] {
    std::string bytes(size_t(kLength), 0);
    Random random(7);
    for (char& byte : bytes) byte = char(random.next());
    return bytes;
  }();
  return made;
}

const std::string& path() {
  static const std::string made = [] {
    File file;
    CHECK(File::create_new(folder() + "/read", false, FileOwner::log, &file).ok());
    CHECK(file.write(content().data(), kLength, 0).ok());
    return file.path();
  }();
  return made;
}

std::unique_ptr<FileReader> open(bool direct, const std::string& name = path()) {
  std::unique_ptr<FileReader> reader;
  const Status status = FileReader::open(name, direct, FileOwner::log, &reader);
  CHECK(status.ok(), status.message());
  return reader;
}

bool says(const Status& status, const std::string& words) { return status.message().find(words) != std::string::npos; }

void check_read(FileReader* reader, int64_t offset, int64_t bytes) {
  std::string out(size_t(bytes), 'x');
  const Status status = reader->read(offset, out.data(), bytes);
  CHECK(status.ok(), status.message());
  CHECK(out == content().substr(size_t(offset), size_t(bytes)), offset, bytes);
}

void ascending_reads_come_from_what_was_read_ahead() {
  for (const bool direct : {true, false}) {
    for (const int64_t most : {int64_t{100'000}, 3 * kMiB, 30 * kMiB, kLength}) {
      const std::unique_ptr<FileReader> reader = open(direct);
      Random random{uint64_t(most)};
      for (int64_t at = 0; at < kLength;) {
        const int64_t bytes = most == kLength ? kLength : std::min(kLength - at, 1 + random.below(most));
        check_read(reader.get(), at, bytes);
        at += bytes;
        if (random.below(10) == 0) at += random.below(5000);
      }
      CHECK(reader->bytes_from_ahead() > 30 * kMiB, most, direct, reader->bytes_from_ahead());
    }
  }
}

void any_order_gives_the_same_bytes() {
  const std::unique_ptr<FileReader> reader = open(true);
  Random random(3);
  int64_t at = 0;
  for (int i = 0; i < 600; ++i) {
    if (random.below(8) == 0) at = random.below(kLength);
    const int64_t bytes = std::min(kLength - at, random.below(random.below(5) == 0 ? 9 * kMiB : 200'000));
    check_read(reader.get(), at, bytes);
    at += random.below(3) == 0 ? 0 : bytes;
  }
  CHECK(reader->bytes_from_ahead() > 0);
}

void a_read_elsewhere_does_not_disturb_those_that_ascend() {
  const std::unique_ptr<FileReader> reader = open(true);
  check_read(reader.get(), 0, 2 * kMiB);
  for (int64_t at = 2 * kMiB; at < 40 * kMiB; at += kMiB) {
    const int64_t before = reader->bytes_from_ahead();
    check_read(reader.get(), at, kMiB);
    CHECK(reader->bytes_from_ahead() == before + kMiB, at);
    check_read(reader.get(), kLength - 100, 100);
  }
}

void small_files_are_read_without_threads() {
  File file;
  CHECK(File::create_new(folder() + "/small", false, FileOwner::log, &file).ok());
  CHECK(file.write(content().data(), 9 * kMiB, 0).ok());
  const std::unique_ptr<FileReader> reader = open(true, file.path());
  for (int64_t at = 0; at < 9 * kMiB; at += kMiB) check_read(reader.get(), at, kMiB);
  CHECK(reader->bytes_from_ahead() == 0);
  int64_t bytes;
  CHECK(reader->size(&bytes).ok() && bytes == 9 * kMiB);
}

void the_end_is_an_error_and_moves_as_the_file_grows() {
  const std::string name = folder() + "/grows";
  File file;
  CHECK(File::create_new(name, false, FileOwner::log, &file).ok());
  int64_t length = 18 * kMiB + 5;
  CHECK(file.write(content().data(), length, 0).ok());
  const std::unique_ptr<FileReader> reader = open(true, name);
  std::vector<char> out(size_t(10 * kMiB));
  for (int64_t at = 0; at < length; at += kMiB) check_read(reader.get(), at, std::min(kMiB, length - at));
  Random random(4);
  while (length < 40 * kMiB) {
    Status status = reader->read(length, out.data(), 1);
    CHECK(says(status, "only 0 are there. The file was cut, or is still being written"), status.message());
    status = reader->read(length - 3, out.data(), 10);
    CHECK(says(status, "are there."), status.message());
    const int64_t more = 1 + random.below(3 * kMiB);
    CHECK(file.write(content().data() + length, more, length).ok());
    check_read(reader.get(), length, more);
    length += more;
  }
  CHECK(says(reader->read(-1, out.data(), 1), "failed"));
  CHECK(!reader->read(INT64_MAX - 5, out.data(), 10).ok());
  CHECK(!reader->read(INT64_MAX - 5, out.data(), 10 * kMiB).ok());
}

void a_failed_read_can_be_made_again() {
  const std::unique_ptr<FileReader> reader = open(true);
  check_read(reader.get(), 0, 2 * kMiB);
  std::vector<char> out(size_t(10 * kMiB));
  Status status;
  int64_t at = 2 * kMiB;
  Faults::instance().inject({FileCall::read, "/read", EIO, 0, 1});
  for (; status.ok() && at < 40 * kMiB; at += kMiB) status = reader->read(at, out.data(), kMiB);
  CHECK(says(status, "Input/output error"), status.message());
  Faults::instance().clear();
  for (at -= kMiB; at < 40 * kMiB; at += kMiB) check_read(reader.get(), at, kMiB);
}

void several_threads_may_read() {
  const std::unique_ptr<FileReader> reader = open(true);
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      Random random(number);
      for (int64_t at = random.below(kLength); at + 500'000 < kLength; at += 500'000)
        check_read(reader.get(), at, 500'000);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void what_is_closed_is_read_no_more_and_a_forked_child_reads_alone() {
  const std::unique_ptr<FileReader> reader = open(true);
  check_read(reader.get(), 0, 8 * kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    check_read(reader.get(), 8 * kMiB, 5 * kMiB);
    reader->close();
    std::_Exit(0);
  }
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child && how == 0, how);
  check_read(reader.get(), 8 * kMiB, 8 * kMiB);
  reader->close();
  char byte;
  CHECK(says(reader->read(0, &byte, 1), "It was closed"));
  reader->close();
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::ascending_reads_come_from_what_was_read_ahead();
  shoal::any_order_gives_the_same_bytes();
  shoal::a_read_elsewhere_does_not_disturb_those_that_ascend();
  shoal::small_files_are_read_without_threads();
  shoal::the_end_is_an_error_and_moves_as_the_file_grows();
  shoal::a_failed_read_can_be_made_again();
  shoal::several_threads_may_read();
  shoal::what_is_closed_is_read_no_more_and_a_forked_child_reads_alone();
}
