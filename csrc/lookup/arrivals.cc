#include "lookup/arrivals.h"

#include "base/thread_pool.h"
#include "kernels/rows_io.h"

namespace shoal {

Status arrive(const std::vector<Arrival>& tables, int threads) {
  std::vector<Status> statuses(tables.size());
  const auto each = [&](const auto& body) {
    ThreadPool::instance().run(static_cast<int64_t>(tables.size()), threads, [&](int64_t t) {
      const size_t i = static_cast<size_t>(t);
      statuses[i] = body(tables[i]);
    });
    for (Status& status : statuses)
      if (!status.ok()) return std::move(status);
    return Status();
  };
  if (Status status = each([](const Arrival& table) { return table.index->reserve(table.n); }); !status.ok())
    return status;
  Status status = each([](const Arrival& table) {
    table.store->take(table.slots, table.n);
    Status inserted = table.index->insert(table.keys, table.slots, table.n);
    if (!inserted.ok()) table.store->give(table.slots, table.n);
    return inserted;
  });
  if (!status.ok())
    for (const Arrival& table : tables) leave(table.index, table.store, table.keys, table.n);
  return status;
}

void leave(Index* index, DramStore* store, const int64_t* keys, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (const uint32_t slot = index->erase(keys[i]); slot != kNoSlot) store->give(&slot, 1);
}

void relocate(Index* index, DramStore* store, const int64_t* keys, const uint32_t* slots, int64_t n) {
  std::vector<uint32_t> to(static_cast<size_t>(n));
  store->take(to.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    store->move(slots[i], to[static_cast<size_t>(i)]);
    index->reassign(keys[i], to[static_cast<size_t>(i)]);
  }
  store->give(slots, n);
}

void Limbo::erase(Index* index, const DramStore& store, const int64_t* keys, int64_t n, int64_t lease) {
  std::vector<uint32_t>& slots = waiting_.emplace_back(Waiting{lease, {}}).slots;
  try {
    slots.reserve(static_cast<size_t>(n));
  } catch (...) {
    waiting_.pop_back();
    throw;
  }
  for (int64_t i = 0; i < n; ++i)
    if (const uint32_t slot = index->erase(keys[i]); slot != kNoSlot) slots.push_back(slot);
  set_flags(store.rows(), slots.data(), static_cast<int64_t>(slots.size()), kErased);
  if (slots.empty()) waiting_.pop_back();
}

void Limbo::free(DramStore& store, std::optional<int64_t> oldest) {
  while (!waiting_.empty() && (!oldest || waiting_.front().lease < *oldest)) {
    store.give(waiting_.front().slots.data(), static_cast<int64_t>(waiting_.front().slots.size()));
    waiting_.pop_front();
  }
}

}  // namespace shoal
