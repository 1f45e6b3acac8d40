#include "base/ended_numbers.h"

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

std::vector<int64_t> taken(EndedNumbers& list) {
  std::vector<int64_t> numbers;
  list.take([&](int64_t number) { numbers.push_back(number); });
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void what_ended_is_taken_once() {
  auto list = std::make_shared<EndedNumbers>();
  CHECK(!list->any() && taken(*list).empty());
  for (int64_t number : {3, 1, 2}) EndedNumbers::add(new EndedNumbers::Note{number, list});
  CHECK(list->any());
  CHECK(taken(*list) == std::vector<int64_t>({1, 2, 3}));
  CHECK(!list->any() && taken(*list).empty());
  EndedNumbers::add(new EndedNumbers::Note{7, list});  // never taken: the list frees it
}

void what_could_not_be_handed_over_comes_again() {
  auto list = std::make_shared<EndedNumbers>();
  for (int64_t number : {1, 2, 3, 4}) EndedNumbers::add(new EndedNumbers::Note{number, list});
  std::vector<int64_t> all;
  bool threw = false;
  try {
    list->take([&](int64_t number) {
      if (all.size() == 2) throw std::bad_alloc();
      all.push_back(number);
    });
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  CHECK(threw && list->any());
  for (int64_t number : taken(*list)) all.push_back(number);
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<int64_t>({1, 2, 3, 4}));
}

void a_note_outlives_the_owner() {
  auto list = std::make_shared<EndedNumbers>();
  auto* first = new EndedNumbers::Note{1, list};
  auto* second = new EndedNumbers::Note{2, list};
  EndedNumbers::add(first);
  list.reset();
  EndedNumbers::add(second);
}

void threads_add_while_one_takes() {
  constexpr int kThreads = 4, kEach = 5000;
  auto list = std::make_shared<EndedNumbers>();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) EndedNumbers::add(new EndedNumbers::Note{int64_t{t} * kEach + i, list});
    });
  std::vector<int64_t> all;
  while (all.size() < size_t{kThreads} * kEach)
    for (int64_t number : taken(*list)) all.push_back(number);
  for (std::thread& thread : threads) thread.join();
  std::sort(all.begin(), all.end());
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == static_cast<int64_t>(i));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_ended_is_taken_once();
  shoal::what_could_not_be_handed_over_comes_again();
  shoal::a_note_outlives_the_owner();
  shoal::threads_add_while_one_takes();
}
