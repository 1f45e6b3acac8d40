#include "base/ended.h"

#include <algorithm>
#include <thread>

#include "base/check.h"

namespace shoal {
namespace {

std::vector<int64_t> sorted(std::vector<int64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

void what_ended_is_taken_once() {
  auto list = std::make_shared<Ended>();
  CHECK(!list->any() && list->take().empty());
  for (int64_t number : {3, 1, 2}) Ended::add(new Ended::Note{number, list});
  CHECK(list->any());
  CHECK(sorted(list->take()) == std::vector<int64_t>({1, 2, 3}));
  CHECK(!list->any() && list->take().empty());
  Ended::add(new Ended::Note{7, list});  // and nobody takes it
}

void a_note_outlives_the_owner() {
  auto list = std::make_shared<Ended>();
  auto* first = new Ended::Note{1, list};
  auto* second = new Ended::Note{2, list};
  Ended::add(first);
  list.reset();
  Ended::add(second);
}

void threads_add_while_one_takes() {
  constexpr int kThreads = 4, kEach = 5000;
  auto list = std::make_shared<Ended>();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) Ended::add(new Ended::Note{int64_t{t} * kEach + i, list});
    });
  std::vector<int64_t> all;
  while (all.size() < size_t{kThreads} * kEach)
    for (int64_t number : list->take()) all.push_back(number);
  for (std::thread& thread : threads) thread.join();
  all = sorted(all);
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == static_cast<int64_t>(i));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::what_ended_is_taken_once();
  shoal::a_note_outlives_the_owner();
  shoal::threads_add_while_one_takes();
}
