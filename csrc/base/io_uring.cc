#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/io.h"

namespace shoal {

namespace {

// Memory that the kernel and the process share.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
  }

  bool map(int ring, size_t bytes, int64_t offset) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, offset);
    if (at == MAP_FAILED) return false;
    at_ = static_cast<char*>(at);
    bytes_ = bytes;
    return true;
  }

  template <typename T>
  T* as(uint32_t offset) const {
    return reinterpret_cast<T*>(at_ + offset);
  }

 private:
  char* at_ = nullptr;
  size_t bytes_ = 0;
};

unsigned acquire(unsigned* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); }
void release(unsigned* word, unsigned value) { std::atomic_ref(*word).store(value, std::memory_order_release); }

// A queue of requests to the kernel and one of its answers. For one thread at a time.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (ring_ >= 0) ::close(ring_);
  }

  bool open(unsigned entries) {
    io_uring_params given{};
    ring_ = int(::syscall(__NR_io_uring_setup, entries, &given));
    // Both queues in one mapping and reads that need no other call are as old as Linux 5.6.
    if (ring_ < 0 || !(given.features & IORING_FEAT_SINGLE_MMAP) || !(given.features & IORING_FEAT_RW_CUR_POS))
      return false;
    const size_t asked_bytes = given.sq_off.array + given.sq_entries * sizeof(unsigned);
    const size_t answered_bytes = given.cq_off.cqes + given.cq_entries * sizeof(io_uring_cqe);
    if (!queues_.map(ring_, std::max(asked_bytes, answered_bytes), IORING_OFF_SQ_RING)) return false;
    if (!entries_.map(ring_, given.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return false;
    asked_tail_ = queues_.as<unsigned>(given.sq_off.tail);
    asked_mask_ = *queues_.as<unsigned>(given.sq_off.ring_mask);
    asked_ = queues_.as<unsigned>(given.sq_off.array);
    answered_head_ = queues_.as<unsigned>(given.cq_off.head);
    answered_tail_ = queues_.as<unsigned>(given.cq_off.tail);
    answered_mask_ = *queues_.as<unsigned>(given.cq_off.ring_mask);
    answers_ = queues_.as<io_uring_cqe>(given.cq_off.cqes);
    size_ = given.sq_entries;
    return true;
  }

  unsigned size() const { return size_; }

  // REQUIRES: fewer than size() are under way.
  void ask(const IoRequest& request, uint64_t number) {
    const unsigned tail = *asked_tail_;
    const unsigned at = tail & asked_mask_;
    io_uring_sqe& entry = entries_.as<io_uring_sqe>(0)[at];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = request.call == FileCall::read ? IORING_OP_READ : IORING_OP_WRITE;
    entry.fd = request.file->descriptor();
    // What was moved already is not asked for again.
    entry.addr = reinterpret_cast<uint64_t>(request.memory + request.moved);
    entry.len = uint32_t(request.bytes - request.moved);
    entry.off = uint64_t(request.offset + request.moved);
    entry.user_data = number;
    asked_[at] = at;
    release(asked_tail_, tail + 1);
    ++waiting_;
  }

  // Hands over what was asked and waits for an answer; an errno if the kernel takes nothing.
  int hand_over() {
    while (true) {
      const long taken = ::syscall(__NR_io_uring_enter, ring_, waiting_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        waiting_ -= unsigned(taken);
        return 0;
      }
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    }
  }

  template <typename Take>
  void answers(const Take& take) {
    unsigned head = *answered_head_;
    const unsigned tail = acquire(answered_tail_);
    for (; head != tail; ++head) {
      const io_uring_cqe& answer = answers_[head & answered_mask_];
      take(answer.user_data, answer.res);
    }
    release(answered_head_, head);
  }

 private:
  int ring_ = -1;
  Mapping queues_, entries_;
  unsigned *asked_tail_, *asked_, *answered_head_, *answered_tail_;
  unsigned asked_mask_ = 0, answered_mask_ = 0, size_ = 0, waiting_ = 0;
  io_uring_cqe* answers_ = nullptr;
};

class Uring : public Io {
 public:
  explicit Uring(int depth) : Io(depth) {}

  // Whether the kernel allows it.
  bool open() {
    std::unique_ptr<Ring> ring = take();
    if (ring == nullptr) return false;
    give(std::move(ring));
    return true;
  }

  std::string name() const override { return "io_uring"; }

  void run(std::vector<IoRequest>* requests) override {
    std::unique_ptr<Ring> ring = take();
    if (ring == nullptr) {  // as when a process may have no more of them
      for (IoRequest& request : *requests) request.moved = -ENOMEM;
      return;
    }
    if (run_on(ring.get(), requests)) give(std::move(ring));
  }

 private:
  static bool run_on(Ring* ring, std::vector<IoRequest>* requests) {
    size_t next = 0, under_way = 0;
    std::vector<size_t> again;
    const auto ask = [&](size_t number) {
      IoRequest& request = (*requests)[number];
      if (const int error = Faults::instance().check(request.call, request.file->path())) {
        request.moved = -error;
        return;
      }
      ring->ask(request, number);
      ++under_way;
    };
    while (true) {
      while (under_way < ring->size() && !again.empty()) {
        const size_t number = again.back();
        again.pop_back();
        ask(number);
      }
      while (under_way < ring->size() && next < requests->size()) {
        (*requests)[next].moved = 0;
        ask(next++);
      }
      if (under_way == 0) return true;
      if (const int error = ring->hand_over()) {
        // What is under way may still write to memory: closing the ring ends it.
        for (IoRequest& request : *requests) {
          if (request.moved >= 0 && request.moved < request.bytes) request.moved = -error;
        }
        return false;
      }
      ring->answers([&](uint64_t number, int result) {
        IoRequest& request = (*requests)[number];
        --under_way;
        if (result == -EINTR || result == -EAGAIN) {
          again.push_back(number);
        } else if (result < 0) {
          request.moved = result;
        } else {
          request.moved += result;
          if (result > 0 && request.moved < request.bytes) again.push_back(number);
        }
      });
    }
  }

  std::unique_ptr<Ring> take() {
    {
      std::lock_guard lock(mutex_);
      if (!rings_.empty()) {
        std::unique_ptr<Ring> ring = std::move(rings_.back());
        rings_.pop_back();
        return ring;
      }
    }
    auto ring = std::make_unique<Ring>();
    return ring->open(unsigned(depth())) ? std::move(ring) : nullptr;
  }

  void give(std::unique_ptr<Ring> ring) {
    std::lock_guard lock(mutex_);
    rings_.push_back(std::move(ring));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_;  // as many as calls were made beside each other
};

}  // namespace

std::unique_ptr<Io> make_uring(int depth) {
  auto io = std::make_unique<Uring>(depth);
  return io->open() ? std::move(io) : nullptr;
}

std::unique_ptr<Io> make_io(int depth) {
  std::unique_ptr<Io> io = make_uring(depth);
  return io != nullptr ? std::move(io) : make_io_threads(depth);
}

}  // namespace shoal
