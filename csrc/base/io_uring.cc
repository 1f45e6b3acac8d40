#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

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

// What faults know a ring by: it has no path.
const std::string kRingName = "io_uring";

// A queue of requests to the kernel and one of its answers. For one thread at a time.
class Ring {
  static constexpr unsigned kTogether = 8;

 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (ring_ >= 0) ::close(ring_);
  }

  bool open(unsigned entries) {
    if (Faults::instance().check(FileCall::open_ring, kRingName) != 0) return false;
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
  unsigned waiting() const { return waiting_; }

  // Hands over what was asked and waits for so many answers; an errno if the kernel takes nothing.
  // Some at a time: the kernel prepares all that one call brings before the disk gets the first, which is idle until then,
  // as answers tend to come together. Of fio's reads at depth 32, all at once are 0.79, eight 0.94, at depth 128 0.97 and 1.05.
  int hand_over(unsigned answers) {
    if (const int error = Faults::instance().check(FileCall::hand_over, kRingName)) return error;
    while (true) {
      const unsigned some = std::min(waiting_, kTogether);
      const bool is_last = some == waiting_;
      const unsigned flags = answers > 0 && is_last ? IORING_ENTER_GETEVENTS : 0;
      const long taken = ::syscall(__NR_io_uring_enter, ring_, some, is_last ? answers : 0, flags, nullptr, 0);
      if (taken >= 0) {
        waiting_ -= unsigned(taken);
        if (is_last || taken == 0) return 0;
        continue;
      }
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    }
  }

  // Numbers of what was asked and not handed over, which stays so.
  template <typename Take>
  void take_back(const Take& take) {
    for (; waiting_ > 0; --waiting_) {
      const unsigned at = (*asked_tail_ - waiting_) & asked_mask_;
      take(entries_.as<io_uring_sqe>(0)[asked_[at]].user_data);
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

// The requests of one caller, and the ring that they are on.
class UringQueue : public IoQueue {
 public:
  UringQueue(Uring* owner, std::unique_ptr<Ring> ring) : owner_(owner), ring_(std::move(ring)) {
    on_ring_.resize(ring_->size());
    for (uint32_t number = ring_->size(); number > 0; --number) free_.push_back(number - 1);
  }
  ~UringQueue() override;

  void ask(IoRequest* request) override {
    request->moved = 0;
    asked_.push_back(request);
  }

  void begin() override {
    fill();
    if (ring_ != nullptr && ring_->waiting() > 0) check(ring_->hand_over(0));
    if (instead_ != nullptr) instead_->begin();
  }

  IoRequest* next() override {
    fill();
    while (answered_.empty()) {
      if (instead_ != nullptr) return instead_->next();
      if (asked_.empty() && free_.size() == on_ring_.size()) return nullptr;
      if (!take_answers()) {
        check(ring_->hand_over(1));
        take_answers();
      }
      // Before the caller looks at what was answered: the disk has something to do meanwhile.
      begin();
    }
    IoRequest* const request = answered_.front();
    answered_.pop_front();
    return request;
  }

 private:
  // What was asked for goes onto the ring, as far as there is room.
  void fill() {
    while (!asked_.empty() && (instead_ != nullptr || !free_.empty())) {
      IoRequest* const request = asked_.front();
      asked_.pop_front();
      if (instead_ != nullptr) {
        instead_->ask(request);
      } else if (const int error = Faults::instance().check(request->call, request->file->path())) {
        answer(request, -error);
      } else {
        on_ring_[free_.back()] = request;
        ring_->ask(*request, free_.back());
        free_.pop_back();
      }
    }
  }

  // Whether there were any.
  bool take_answers() {
    const size_t before = free_.size();
    if (ring_ != nullptr) ring_->answers([this](uint64_t number, int result) { take(number, result); });
    return free_.size() != before;
  }

  void take(uint64_t number, int result) {
    IoRequest* const request = on_ring_[number];
    free_.push_back(uint32_t(number));
    if (result == -EINTR || result == -EAGAIN || (result > 0 && request->moved + result < request->bytes)) {
      request->moved += std::max(result, 0);
      asked_.push_front(request);
    } else {
      answer(request, result < 0 ? result : request->moved + result);
    }
  }

  void answer(IoRequest* request, int64_t moved) {
    request->moved = moved;
    answered_.push_back(request);
  }

  // Where the kernel takes nothing any more, threads do what it has not taken.
  void check(int error);

  Uring* const owner_;
  std::unique_ptr<Ring> ring_;
  std::unique_ptr<IoQueue> instead_;  // of the ring, once that is lost
  std::deque<IoRequest*> asked_;      // that are not on the ring
  std::vector<IoRequest*> on_ring_;   // by number
  std::vector<uint32_t> free_;        // numbers
  std::deque<IoRequest*> answered_;
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

  // Where there is no ring for it, as where a process has no descriptor or no memory to lock left, threads do its work.
  std::unique_ptr<IoQueue> queue() override {
    std::unique_ptr<Ring> ring = take();
    return ring != nullptr ? std::make_unique<UringQueue>(this, std::move(ring)) : queue_of_threads();
  }

  std::unique_ptr<IoQueue> queue_of_threads() { return threads_->queue(); }

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
  std::vector<std::unique_ptr<Ring>> rings_;                      // as many as there were queues at the same time
  const std::unique_ptr<Io> threads_ = make_io_threads(depth());  // that begin with their first request
};

void UringQueue::check(int error) {
  if (error == 0) return;
  instead_ = owner_->queue_of_threads();
  ring_->take_back([this](uint64_t number) {
    asked_.push_back(on_ring_[number]);
    free_.push_back(uint32_t(number));
  });
  // What it has taken it still does, and would read and write memory that is another's by then. Its answers come into
  // memory that is shared, without a call.
  while (free_.size() < on_ring_.size())
    if (!take_answers()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  ring_.reset();
  fill();
}

UringQueue::~UringQueue() {
  while (next() != nullptr) {
  }
  if (ring_ != nullptr) owner_->give(std::move(ring_));
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
