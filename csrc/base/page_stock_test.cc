#include "base/page_stock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

bool waits_for(int64_t ready) {
  for (int i = 0; i < 2000 && PageStock::instance().ready() != ready; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return PageStock::instance().ready() == ready;
}

void fills_up_to_what_is_wanted_and_no_further() {
  PageStock& stock = PageStock::instance();
  CHECK(stock.ready() == 0);
  stock.want(3);
  CHECK(waits_for(3), stock.ready());
  stock.want(2);
  CHECK(waits_for(5), stock.ready());
  std::vector<Pages> taken(7);
  for (Pages& pages : taken) {
    CHECK(stock.take(&pages).ok() && pages.size() == kHugePage);
    for (size_t at = 0; at < kHugePage; at += 4096) CHECK(pages.data()[at] == 0, at);
    pages.data()[kHugePage - 1] = 1;
  }
  CHECK(waits_for(5), stock.ready());
  stock.want(-4);
  CHECK(stock.ready() <= 1);
  CHECK(waits_for(1));
  stock.want(-1);
  CHECK(stock.ready() == 0);
  stock.want(PageStock::kMost + 40);
  stock.want(-PageStock::kMost - 40 + 2);
  CHECK(waits_for(2));
  stock.want(-2);
}

void many_threads_share_it() {
  PageStock& stock = PageStock::instance();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        stock.want(1);
        Pages pages;
        CHECK(stock.take(&pages).ok());
        pages.data()[0] = 1;
        stock.want(-1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(waits_for(0));
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // whose own locks do not survive a fork
void a_child_has_a_stock_of_its_own() {
  PageStock::instance().want(2);
  CHECK(waits_for(2));
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    PageStock& stock = PageStock::instance();
    bool empty = stock.ready() == 0;
    stock.want(-2);  // a parent's store that ends here
    Pages pages;
    bool took = stock.take(&pages).ok();
    _exit(empty && took ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, status);
  PageStock::instance().want(-2);
}
#else
void a_child_has_a_stock_of_its_own() {}
#endif

}  // namespace
}  // namespace shoal

int main() {
  shoal::fills_up_to_what_is_wanted_and_no_further();
  shoal::many_threads_share_it();
  shoal::a_child_has_a_stock_of_its_own();
}
