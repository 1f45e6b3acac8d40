// Numbers of things that ended, noted by whichever thread let go of the last that held one, and collected by their owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace shoal {

// Thread safety: all methods may run concurrently.
class EndedNumbers {
 public:
  struct Note {
    int64_t number;
    std::shared_ptr<EndedNumbers> list;  // which outlives its owner while something holds a note
    Note* next = nullptr;
  };

  EndedNumbers() = default;
  EndedNumbers(const EndedNumbers&) = delete;
  EndedNumbers& operator=(const EndedNumbers&) = delete;
  ~EndedNumbers() {
    for (Note* note = first_.load(); note;) delete std::exchange(note, note->next);
  }

  // Says that the number ended. Allocates no memory, and waits for no thread. The list owns the note from here on.
  static void add(Note* note) noexcept {
    const std::shared_ptr<EndedNumbers> list = std::move(note->list);  // or the list would hold itself
    list->push(note);
  }

  bool any() const { return first_.load(std::memory_order_relaxed) != nullptr; }

  // Hands all numbers that ended since the last call to `visit`, in no order. If `visit` throws, that number and those
  // after it come again with the next call.
  template <typename Visit>
  void take(const Visit& visit) {
    Note* note = first_.exchange(nullptr, std::memory_order_acquire);
    try {
      while (note) {
        visit(note->number);
        delete std::exchange(note, note->next);
      }
    } catch (...) {
      while (note) push(std::exchange(note, note->next));
      throw;
    }
  }

 private:
  void push(Note* note) noexcept {
    note->next = first_.load(std::memory_order_relaxed);
    while (!first_.compare_exchange_weak(note->next, note, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  std::atomic<Note*> first_{nullptr};
};

}  // namespace shoal
