// Numbers of things that ended, noted by whichever thread let go of the last that held one, and collected by their owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace shoal {

// Thread safety: every method may run beside any other.
class Ended {
 public:
  struct Note {
    int64_t number;
    std::shared_ptr<Ended> list;  // which outlives its owner while something holds a note
    Note* next = nullptr;
  };

  Ended() = default;
  Ended(const Ended&) = delete;
  Ended& operator=(const Ended&) = delete;
  ~Ended() {
    for (Note* note = first_.load(); note;) delete std::exchange(note, note->next);
  }

  // It ended. Asks for no memory, and waits for nobody. The note is the list's from here on.
  static void add(Note* note) noexcept {
    const std::shared_ptr<Ended> list = std::move(note->list);  // or the list would hold itself
    note->next = list->first_.load(std::memory_order_relaxed);
    while (
        !list->first_.compare_exchange_weak(note->next, note, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  bool any() const { return first_.load(std::memory_order_relaxed) != nullptr; }

  // All that ended since the last call, in no order.
  std::vector<int64_t> take() {
    std::vector<int64_t> numbers;
    size_t count = 0;
    Note* const notes = first_.exchange(nullptr, std::memory_order_acquire);
    for (Note* note = notes; note; note = note->next) ++count;
    numbers.reserve(count);
    for (Note* note = notes; note;) {
      numbers.push_back(note->number);
      delete std::exchange(note, note->next);
    }
    return numbers;
  }

 private:
  std::atomic<Note*> first_{nullptr};
};

}  // namespace shoal
