#include "base/io.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/check.h"
#include "base/folder_test.h"

namespace shoal {
namespace {

struct Memory {
  explicit Memory(int64_t bytes) : at(static_cast<char*>(std::aligned_alloc(kBlockBytes, size_t(bytes)))) {}
  ~Memory() { std::free(at); }
  char* at;
};

std::vector<std::unique_ptr<Io>> both() {
  std::vector<std::unique_ptr<Io>> engines;
  engines.push_back(make_io_threads(8));
  if (auto uring = make_uring(8)) engines.push_back(std::move(uring));
  return engines;
}

void what_is_written_is_read(Io* io, bool direct) {
  constexpr int64_t kBlocks = 100;
  File file;
  CHECK(File::create(folder() + "/a.seg", direct, &file).ok());
  Memory memory(kBlocks * kBlockBytes), back(kBlocks * kBlockBytes);
  std::vector<IoRequest> writes, reads;
  for (int64_t block = 0; block < kBlocks; ++block) {
    std::memset(memory.at + block * kBlockBytes, int(block + 1), kBlockBytes);
    writes.push_back({FileCall::write, &file, memory.at + block * kBlockBytes, kBlockBytes, block * kBlockBytes});
    reads.push_back(
        {FileCall::read, &file, back.at + block * kBlockBytes, kBlockBytes, (block * 37 % 100) * kBlockBytes});
  }
  io->run(&writes);
  for (const IoRequest& write : writes) CHECK(write.status().ok(), write.status().message());
  io->run(&reads);
  for (int64_t block = 0; block < kBlocks; ++block) {
    CHECK(reads[block].status().ok(), reads[block].status().message());
    CHECK(back.at[block * kBlockBytes + 5] == char(block * 37 % 100 + 1), block);
  }
  std::vector<IoRequest> none;
  io->run(&none);
}

void a_file_that_ends_early_says_so(Io* io) {
  File file;
  CHECK(File::create(folder() + "/short.seg", true, &file).ok());
  Memory memory(2 * kBlockBytes);
  std::memset(memory.at, 1, 2 * kBlockBytes);
  CHECK(file.write(memory.at, kBlockBytes, 0).ok());
  std::vector<IoRequest> reads = {{FileCall::read, &file, memory.at, 2 * kBlockBytes, 0}};
  io->run(&reads);
  const Status status = reads[0].status();
  CHECK(status.code() == Code::storage &&
            status.message().find("short.seg] reading 8192 bytes at 0: only 4096") != std::string::npos,
        status.message());
}

void a_fault_is_the_answer_of_its_request_alone(Io* io) {
  File file;
  CHECK(File::create(folder() + "/fault.seg", true, &file).ok());
  Memory memory(8 * kBlockBytes);
  std::memset(memory.at, 1, 8 * kBlockBytes);
  std::vector<IoRequest> writes;
  for (int64_t block = 0; block < 8; ++block)
    writes.push_back({FileCall::write, &file, memory.at + block * kBlockBytes, kBlockBytes, block * kBlockBytes});
  Faults::instance().inject({FileCall::write, "fault.seg", ENOSPC, 3, 2});
  io->run(&writes);
  Faults::instance().clear();
  int failed = 0;
  for (const IoRequest& write : writes) {
    if (write.status().ok()) continue;
    ++failed;
    CHECK(write.status().message().find("No space left on device") != std::string::npos, write.status().message());
  }
  CHECK(failed == 2, failed);
  io->run(&writes);
  for (const IoRequest& write : writes) CHECK(write.status().ok());
}

void queues_are_under_way_beside_each_other(Io* io) {
  File file;
  CHECK(File::create(folder() + "/beside.seg", true, &file).ok());
  Memory memory(64 * kBlockBytes), back(64 * kBlockBytes);
  std::vector<IoRequest> writes;
  for (int64_t block = 0; block < 64; ++block) {
    std::memset(memory.at + block * kBlockBytes, int(block + 1), kBlockBytes);
    writes.push_back({FileCall::write, &file, memory.at + block * kBlockBytes, kBlockBytes, block * kBlockBytes});
  }
  std::unique_ptr<IoQueue> first = io->queue(), second = io->queue();
  for (size_t block = 0; block < 64; ++block) (block % 2 == 0 ? first : second)->ask(&writes[block]);
  first->begin();
  int answered = 0;
  while (const IoRequest* write = second->next()) {
    CHECK((write - writes.data()) % 2 == 1 && write->status().ok());
    ++answered;
  }
  CHECK(answered == 32, answered);
  first.reset();  // waits too
  for (const IoRequest& write : writes) CHECK(write.status().ok());
  CHECK(file.read(back.at, 64 * kBlockBytes, 0).ok());
  CHECK(std::memcmp(memory.at, back.at, 64 * kBlockBytes) == 0);
}

void an_answered_request_can_be_asked_for_anew(Io* io) {
  File file;
  CHECK(File::create(folder() + "/anew.seg", true, &file).ok());
  constexpr int64_t kBlocks = 200;
  Memory memory(kBlocks * kBlockBytes), back(3 * kBlockBytes);
  for (int64_t block = 0; block < kBlocks; ++block)
    std::memset(memory.at + block * kBlockBytes, int(block + 1), kBlockBytes);
  CHECK(file.write(memory.at, kBlocks * kBlockBytes, 0).ok());
  const std::unique_ptr<IoQueue> queue = io->queue();
  CHECK(queue->next() == nullptr);
  std::vector<IoRequest> reads;
  int64_t asked = 0, answered = 0;
  for (; asked < 3; ++asked)
    reads.push_back({FileCall::read, &file, back.at + asked * kBlockBytes, kBlockBytes, asked * kBlockBytes});
  for (IoRequest& read : reads) queue->ask(&read);
  while (IoRequest* read = queue->next()) {
    CHECK(read->status().ok() && read->memory[9] == char(read->offset / kBlockBytes + 1), read->offset);
    ++answered;
    if (asked == kBlocks) continue;
    read->offset = asked++ * kBlockBytes;
    queue->ask(read);
  }
  CHECK(answered == kBlocks, answered);
}

void calls_from_several_threads_do_not_meet(Io* io) {
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([io, number] {
      File file;
      CHECK(File::create(folder() + "/t" + std::to_string(number) + ".seg", true, &file).ok());
      Memory memory(16 * kBlockBytes), back(16 * kBlockBytes);
      for (int round = 0; round < 20; ++round) {
        std::memset(memory.at, number * 20 + round + 1, 16 * kBlockBytes);
        std::vector<IoRequest> writes, reads;
        for (int64_t block = 0; block < 16; ++block) {
          writes.push_back({FileCall::write, &file, memory.at + block * kBlockBytes, kBlockBytes, block * kBlockBytes});
          reads.push_back({FileCall::read, &file, back.at + block * kBlockBytes, kBlockBytes, block * kBlockBytes});
        }
        io->run(&writes);
        io->run(&reads);
        for (const IoRequest& read : reads) CHECK(read.status().ok());
        CHECK(std::memcmp(memory.at, back.at, 16 * kBlockBytes) == 0, number, round);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void a_queue_without_a_ring_is_served_by_threads() {
  for (const int error : {EMFILE, ENFILE, ENOMEM, EPERM}) {
    const std::unique_ptr<Io> io = make_uring(8);
    if (io == nullptr) return;
    const std::unique_ptr<IoQueue> with_ring = io->queue();
    Faults::instance().inject({FileCall::open_ring, "", error, 0, 1'000'000});
    what_is_written_is_read(io.get(), true);
    queues_are_under_way_beside_each_other(io.get());
    a_fault_is_the_answer_of_its_request_alone(io.get());  // and clears them
  }
}

// The kernel takes some requests, then none: what it took must be done before anyone has its memory back.
void a_ring_that_is_lost_loses_no_request() {
  constexpr int64_t kBytes = int64_t{1} << 20, kReads = 24;
  File file;
  CHECK(File::create(folder() + "/lost.seg", true, &file).ok());
  Memory memory(kBytes), back(kReads * kBytes);
  for (int64_t number = 0; number < kReads; ++number) {
    std::memset(memory.at, int(number + 1), kBytes);
    CHECK(file.write(memory.at, kBytes, number * kBytes).ok());
  }
  for (int64_t after = 0; after < 6; ++after) {
    const std::unique_ptr<Io> io = make_uring(8);
    if (io == nullptr) return;
    std::memset(back.at, 0, kReads * kBytes);
    Faults::instance().inject({FileCall::hand_over, "", EBADF, after, 1});
    std::vector<IoRequest> reads;
    for (int64_t number = 0; number < kReads; ++number)
      reads.push_back({FileCall::read, &file, back.at + number * kBytes, kBytes, number * kBytes});
    const std::unique_ptr<IoQueue> queue = io->queue();
    for (size_t number = 0; number < kReads; ++number) {
      queue->ask(&reads[number]);
      if (number == 4) queue->begin();
    }
    int64_t answered = 0;
    for (; IoRequest* read = queue->next(); ++answered) {
      const char wanted = char(read->offset / kBytes + 1);
      CHECK(read->status().ok(), after, read->status().message());
      CHECK(read->memory[0] == wanted && read->memory[kBytes - 1] == wanted, after, read->offset);
      // It is the caller's: no thread writes to it any more.
      std::memset(read->memory, 0, kBytes);
    }
    CHECK(answered == kReads, after, answered);
    for (int64_t at = 0; at < kReads * kBytes; at += 512) CHECK(back.at[at] == 0, after, at);
    Faults::instance().clear();
    what_is_written_is_read(io.get(), true);  // by another ring
  }
}

void where_io_uring_is_denied_threads_are_chosen() {
  Faults::instance().inject({FileCall::open_ring, "", EPERM, 0, 2});
  CHECK(make_uring(8) == nullptr);
  const std::unique_ptr<Io> io = make_io(8);
  Faults::instance().clear();
  CHECK(io->name() == "threads", io->name());
  what_is_written_is_read(io.get(), true);
}

// From now on, in this process; false where even that is not allowed.
bool deny_io_uring() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {sizeof program / sizeof *program, program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// As in a container. In a child: it cannot be taken back.
template <typename Body>
void where_the_kernel_denies_io_uring(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int how = 0;
  CHECK(::waitpid(child, &how, 0) == child && how == 0, how);
}

void a_kernel_that_denies_io_uring_is_noticed() {
  where_the_kernel_denies_io_uring([] {
    if (!deny_io_uring()) return;
    const std::unique_ptr<Io> io = make_io(8);
    CHECK(io->name() == "threads", io->name());
    what_is_written_is_read(io.get(), true);
  });
  where_the_kernel_denies_io_uring([] {
    const std::unique_ptr<Io> io = make_io(8);
    if (!deny_io_uring()) return;  // though a ring is open
    what_is_written_is_read(io.get(), true);
    queues_are_under_way_beside_each_other(io.get());
  });
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::folder();                                    // made here: a child's would stay
  shoal::a_kernel_that_denies_io_uring_is_noticed();  // before there are threads, which no fork should meet
  shoal::where_io_uring_is_denied_threads_are_chosen();
  shoal::a_queue_without_a_ring_is_served_by_threads();
  shoal::a_ring_that_is_lost_loses_no_request();
  for (const auto& io : shoal::both()) {
    for (const bool direct : {true, false}) shoal::what_is_written_is_read(io.get(), direct);
    shoal::a_file_that_ends_early_says_so(io.get());
    shoal::a_fault_is_the_answer_of_its_request_alone(io.get());
    shoal::queues_are_under_way_beside_each_other(io.get());
    shoal::an_answered_request_can_be_asked_for_anew(io.get());
    shoal::calls_from_several_threads_do_not_meet(io.get());
  }
}
