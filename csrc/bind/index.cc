#include "base/thread_pool.h"
#include "bind/bind.h"
#include "index/batch.h"

namespace shoal {

static Keys keys_of(const Integers& keys) { return {keys.data(), is_narrow(keys)}; }

static std::vector<int64_t> find_keys(const std::vector<Index*>& indexes,
                                      const std::vector<std::tuple<int64_t, int64_t, int64_t>>& bounds, Integers keys,
                                      Vector<int32_t> slots, int threads) {
  std::vector<KeyRange> ranges;
  for (size_t i = 0; i < indexes.size(); ++i)
    ranges.push_back({indexes[i], std::get<0>(bounds[i]), std::get<1>(bounds[i]), std::get<2>(bounds[i])});
  std::vector<int64_t> missing(ranges.size());
  find(ranges, keys_of(keys), slots_of(slots), missing.data(), threads);
  return missing;
}

static std::vector<Missing> missing_keys(const std::vector<std::vector<std::tuple<int64_t, int64_t, int64_t>>>& bounds,
                                         Integers keys, Vector<int32_t> slots, int threads) {
  std::vector<Missing> missing(bounds.size());
  ThreadPool::instance().run(int64_t(bounds.size()), threads, [&](int64_t t) {
    std::vector<KeyRange> ranges;
    for (auto [begin, end, shift] : bounds[size_t(t)]) ranges.push_back({nullptr, begin, end, shift});
    missing[size_t(t)] = collect_missing(ranges, keys_of(keys), slots_of(slots));
  });
  return missing;
}

static void insert_all(const std::vector<Index*>& indexes, const std::vector<Vector<const int64_t>>& keys,
                       const std::vector<Vector<int32_t>>& slots, int threads) {
  std::vector<Status> statuses(indexes.size());
  {
    nb::gil_scoped_release release;
    ThreadPool::instance().run(int64_t(indexes.size()), threads, [&](int64_t t) {
      size_t i = size_t(t);
      statuses[i] = indexes[i]->insert(keys[i].data(), slots_of(slots[i]), int64_t(keys[i].shape(0)));
    });
  }
  for (const Status& status : statuses) raise(status);
}

static void reserve_all(const std::vector<Index*>& indexes, const std::vector<int64_t>& more, int threads) {
  std::vector<Status> statuses(indexes.size());
  {
    nb::gil_scoped_release release;
    ThreadPool::instance().run(int64_t(indexes.size()), threads,
                               [&](int64_t t) { statuses[size_t(t)] = indexes[size_t(t)]->reserve(more[size_t(t)]); });
  }
  for (const Status& status : statuses) raise(status);
}

static auto entries(const Index& index, uint64_t from, uint64_t to, uint32_t from_slot) {
  std::vector<int64_t> keys;
  std::vector<int32_t> slots;
  index.scan(from, to, [&](int64_t key, uint32_t slot) {
    if (slot < from_slot) return;
    keys.push_back(key);
    slots.push_back(static_cast<int32_t>(slot));
  });
  return std::make_tuple(to_tensor(std::move(keys)), to_tensor(std::move(slots)));
}

void bind_index(nb::module_& m) {
  nb::class_<Missing>(m, "Missing", "The keys of one table that have no slot, each once")
      .def_prop_ro("count", [](const Missing& missing) { return missing.keys.size(); })
      .def_prop_ro(
          "keys", [](const Missing& missing) { return to_tensor(missing.keys); }, nb::rv_policy::move)
      .def(
          "fill",
          [](const Missing& missing, Vector<int32_t> slots_of_keys, Vector<int32_t> slots) {
            missing.fill(slots_of(slots_of_keys), slots_of(slots));
          },
          nb::arg("slots_of_keys"), nb::arg("slots"), Released());

  nb::class_<Index>(m, "Index", "key -> slot for one table")
      .def(nb::init<>())
      .def("__len__", &Index::size)
      .def_prop_ro("bytes", &Index::bytes)
      .def_prop_ro("extent", &Index::extent)
      .def("bytes_after", &Index::bytes_after, nb::arg("more"))
      .def(
          "erase",
          [](Index& index, Vector<const int64_t> keys, Vector<int32_t> slots) {
            for (size_t i = 0; i < keys.shape(0); ++i) slots_of(slots)[i] = index.erase(keys.data()[i]);
          },
          nb::arg("keys"), nb::arg("slots"), Released(), "slots[i] = the slot key i had, or -1")
      .def(
          "reassign",
          [](Index& index, Vector<const int64_t> keys, Vector<int32_t> slots) {
            for (size_t i = 0; i < keys.shape(0); ++i) index.reassign(keys.data()[i], slots_of(slots)[i]);
          },
          nb::arg("keys"), nb::arg("slots"), Released())
      .def("shrink", &Index::shrink, nb::arg("budget"), Released())
      .def("entries", &entries, nb::arg("from_bucket"), nb::arg("to_bucket"), nb::arg("from_slot") = 0,
           "(keys, slots) of a range of buckets, without the slots below `from_slot`");

  m.def("find", &find_keys, nb::arg("indexes"), nb::arg("bounds"), nb::arg("keys"), nb::arg("slots"),
        nb::arg("threads"), Released(),
        "Slots of keys[begin:end] of each index, written from slots[shift + begin]; returns how many are missing of "
        "each");
  m.def("missing", &missing_keys, nb::arg("bounds"), nb::arg("keys"), nb::arg("slots"), nb::arg("threads"), Released());
  m.def("reserve", &reserve_all, nb::arg("indexes"), nb::arg("more"), nb::arg("threads"));
  m.def("insert", &insert_all, nb::arg("indexes"), nb::arg("keys"), nb::arg("slots"), nb::arg("threads"));
}

}  // namespace shoal
