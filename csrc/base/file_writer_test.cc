#include "base/file_writer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::string random_bytes(int64_t n, uint64_t seed) {
  std::string bytes(size_t(n), 0);
  Random random(seed);
  for (char& byte : bytes) byte = char(random.next());
  return bytes;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::unique_ptr<FileWriter> create(const std::string& path, bool direct) {
  std::unique_ptr<FileWriter> writer;
  const Status status = FileWriter::create(path, direct, FileOwner::log, &writer);
  CHECK(status.ok(), status.message());
  return writer;
}

bool says(const Status& status, const std::string& words) { return status.message().find(words) != std::string::npos; }

// Where direct writes are possible, and where the test says they are not.
void what_is_appended_is_in_the_file() {
  const std::string bytes = random_bytes(41 * kMiB + 77, 1);
  for (const bool direct : {true, false}) {
    for (const int64_t length : {int64_t{0}, int64_t{1}, int64_t{4096}, 4 * kMiB - 1, 4 * kMiB, 4 * kMiB + 1, 8 * kMiB,
                                 20 * kMiB, 41 * kMiB + 77}) {
      const std::string path = folder() + "/written" + std::to_string(length) + (direct ? "d" : "b");
      const std::unique_ptr<FileWriter> writer = create(path, direct);
      Random random{uint64_t(length)};
      uint32_t crc = 0;
      for (int64_t at = 0; at < length;) {
        const int64_t piece =
            std::min(length - at, random.below(4) == 0 ? random.below(9 * kMiB) : random.below(70'000));
        const uint32_t before = crc;
        if (random.below(2) == 0) {
          CHECK(writer->append(bytes.data() + at, piece).ok());
          crc = crc32c(bytes.data() + at, size_t(piece), before);
        } else {
          CHECK(writer->append_checked(bytes.data() + at, piece, before, &crc).ok());
          CHECK(crc == crc32c(bytes.data() + at, size_t(piece), before), at, piece);
        }
        at += piece;
        CHECK(writer->position() == at);
      }
      CHECK(writer->finish().ok() && writer->finish().ok());
      CHECK(says(writer->append("x", 1), "it was finished before"));
      CHECK(content_of(path) == bytes.substr(0, size_t(length)), length, direct);
      CHECK(crc == crc32c(bytes.data(), size_t(length)));
      std::filesystem::remove(path);
    }
  }
}

void an_error_is_told_by_every_later_call() {
  const std::string bytes = random_bytes(4 * kMiB, 2);
  const std::string path = folder() + "/full";
  const std::unique_ptr<FileWriter> writer = create(path, true);
  Faults::instance().inject({FileCall::write, "/full", ENOSPC, 1, 1});
  Status status;
  int64_t appended = 0;
  for (; status.ok() && appended < 20; ++appended) status = writer->append(bytes.data(), 4 * kMiB);
  CHECK(says(status, "No space left") && says(status, "keep the log"), status.message());
  CHECK(appended >= 2 && appended <= 7, appended);  // the second failed, and at most four more were in flight
  CHECK(says(writer->append("x", 1), "No space left"));
  uint32_t crc;
  CHECK(says(writer->append_checked("x", 1, 0, &crc), "No space left"));
  CHECK(says(writer->finish(), "No space left") && says(writer->finish(), "No space left"));
  Faults::instance().clear();
  CHECK(says(writer->finish(), "No space left"));
}

void what_fails_at_the_end_is_told() {
  for (const FileCall call : {FileCall::write, FileCall::truncate, FileCall::sync}) {
    const std::string path = folder() + "/end" + std::to_string(int(call));
    const std::unique_ptr<FileWriter> writer = create(path, true);
    if (call == FileCall::truncate && !writer->direct()) continue;  // nothing to cut off
    CHECK(writer->append("abc", 3).ok());
    Faults::instance().inject({call, "/end", EIO, 0, 1});
    CHECK(says(writer->finish(), "Input/output error") && says(writer->finish(), "Input/output error"));
    Faults::instance().clear();
  }
}

void what_is_abandoned_ends_its_thread_and_stays() {
  const std::string bytes = random_bytes(12 * kMiB, 3);
  const std::string path = folder() + "/abandoned";
  std::unique_ptr<FileWriter> writer = create(path, true);
  CHECK(writer->append(bytes.data(), 12 * kMiB).ok());
  writer->abandon();
  CHECK(says(writer->append("x", 1), "it was abandoned before") && says(writer->finish(), "it was abandoned before"));
  writer.reset();
  CHECK(std::filesystem::exists(path));
  std::unique_ptr<FileWriter> other;
  CHECK(says(FileWriter::create(path, true, FileOwner::log, &other), "File exists") && other == nullptr);
  create(folder() + "/untouched", true).reset();
}

void a_forked_child_is_refused() {
  const std::unique_ptr<FileWriter> writer = create(folder() + "/forked", true);
  const pid_t child = ::fork();
  if (child == 0) std::_Exit(says(writer->append("x", 1), "in a forked child") ? 0 : 1);
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child && how == 0, how);
  CHECK(writer->append("y", 1).ok() && writer->finish().ok() && content_of(writer->path()) == "y");
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_is_appended_is_in_the_file();
  shoal::an_error_is_told_by_every_later_call();
  shoal::what_fails_at_the_end_is_told();
  shoal::what_is_abandoned_ends_its_thread_and_stays();
  shoal::a_forked_child_is_refused();
}
