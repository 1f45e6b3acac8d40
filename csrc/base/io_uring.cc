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

  // Hands over what was asked and waits for so many answers; an errno if the kernel takes nothing.
  int hand_over(unsigned answers) {
    while (true) {
      const unsigned flags = answers > 0 ? IORING_ENTER_GETEVENTS : 0;
      const long taken = ::syscall(__NR_io_uring_enter, ring_, waiting_, answers, flags, nullptr, 0);
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

class Uring;

// The requests of one call, and the ring that they are on.
class PendingUring : public PendingIo {
 public:
  PendingUring(Uring* owner, std::unique_ptr<Ring> ring, std::vector<IoRequest>* requests)
      : owner_(owner), ring_(std::move(ring)), requests_(requests) {
    for (IoRequest& request : *requests) request.moved = ring_ == nullptr ? -ENOMEM : 0;
    if (ring_ == nullptr) return;  // as when a process may have no more of them
    ask();
    if (under_way_ > 0) check(ring_->hand_over(0));
  }
  ~PendingUring() override { wait(); }

  void wait() override;

 private:
  void ask() {
    while (under_way_ < ring_->size() && (!again_.empty() || next_ < requests_->size())) {
      size_t number = next_;
      if (again_.empty()) {
        ++next_;
      } else {
        number = again_.back();
        again_.pop_back();
      }
      IoRequest& request = (*requests_)[number];
      if (const int error = Faults::instance().check(request.call, request.file->path())) {
        request.moved = -error;
        continue;
      }
      ring_->ask(request, number);
      ++under_way_;
    }
  }

  void take(uint64_t number, int result) {
    IoRequest& request = (*requests_)[number];
    --under_way_;
    if (result == -EINTR || result == -EAGAIN) {
      again_.push_back(number);
    } else if (result < 0) {
      request.moved = result;
    } else {
      request.moved += result;
      if (result > 0 && request.moved < request.bytes) again_.push_back(number);
    }
  }

  // Where the kernel takes nothing, closing the ring ends what is under way.
  void check(int error) {
    if (error == 0) return;
    for (IoRequest& request : *requests_) {
      if (request.moved >= 0 && request.moved < request.bytes) request.moved = -error;
    }
    ring_.reset();
  }

  Uring* owner_;
  std::unique_ptr<Ring> ring_;
  std::vector<IoRequest>* requests_;
  size_t next_ = 0, under_way_ = 0;
  std::vector<size_t> again_;
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

  std::unique_ptr<PendingIo> start(std::vector<IoRequest>* requests) override {
    return std::make_unique<PendingUring>(this, take(), requests);
  }

  void give(std::unique_ptr<Ring> ring) {
    std::lock_guard lock(mutex_);
    rings_.push_back(std::move(ring));
  }

 private:
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

  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_;  // as many as calls were made beside each other
};

void PendingUring::wait() {
  while (ring_ != nullptr) {
    ask();
    if (under_way_ == 0) {
      owner_->give(std::move(ring_));
      return;
    }
    check(ring_->hand_over(1));
    if (ring_ != nullptr) ring_->answers([this](uint64_t number, int result) { take(number, result); });
  }
}

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
