#include "base/page_stock.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace shoal {

PageStock& PageStock::instance() { return PerProcess<PageStock>::get(); }

int64_t PageStock::target() const { return std::clamp<int64_t>(wanted_, 0, kMost); }

Status PageStock::take(Pages* out) {
  {
    std::lock_guard lock(mutex_);
    refused_ = false;
    if (!ready_.empty()) {
      *out = std::move(ready_.back());
      ready_.pop_back();
      changed_.notify_one();
      return {};
    }
  }
  if (Status status = Pages::map(kHugePage, out); !status.ok()) return status;
  out->advise_huge();
  return {};
}

void PageStock::want(int64_t change) noexcept {
  if (change == 0) return;
  Pages surplus[kMost];  // unmapped without the mutex
  std::lock_guard lock(mutex_);
  wanted_ += change;
  refused_ = false;
  for (Pages* into = surplus; static_cast<int64_t>(ready_.size()) > target(); ++into) {
    *into = std::move(ready_.back());
    ready_.pop_back();
  }
  if (!has_thread_ && target() > 0) {
    try {
      std::thread([this] { fill(); }).detach();
      has_thread_ = true;
    } catch (const std::system_error&) {
      // Without it pages come when they are touched.
    } catch (const std::bad_alloc&) {
    }
  }
  changed_.notify_one();
}

int64_t PageStock::ready() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(ready_.size());
}

void PageStock::fill() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !refused_ && static_cast<int64_t>(ready_.size()) < target(); });
    lock.unlock();
    Pages pages;
    bool made = Pages::map(kHugePage, &pages).ok();
    if (made) {
      pages.advise_huge();
      made = pages.populate(0, kHugePage);
    }
    lock.lock();
    if (made && static_cast<int64_t>(ready_.size()) < target()) ready_.push_back(std::move(pages));
    refused_ = !made;
  }
}

}  // namespace shoal
