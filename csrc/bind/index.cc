#include <algorithm>

#include "bind/bind.h"
#include "index/batch.h"

namespace shoal {

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

static auto keys_without_others(const MissingKeys& missing,
                                const std::vector<std::vector<std::tuple<uintptr_t, int64_t>>>& others) {
  std::vector<int64_t> all, counts;
  {
    nb::gil_scoped_release released;
    for (size_t t = 0; t < others.size(); ++t) {
      const MissingKeys::Table& table = missing.tables().at(t);
      std::vector<std::span<const int64_t>> spans;
      for (auto [address, count] : others[t]) spans.emplace_back(reinterpret_cast<const int64_t*>(address), count);
      const std::vector<int64_t> left = keys_without({table.keys, size_t(table.count)}, spans);
      all.insert(all.end(), left.begin(), left.end());
      counts.push_back(int64_t(left.size()));
    }
  }
  return std::make_tuple(to_tensor(std::move(all)), counts);
}

void bind_index(nb::module_& m) {
  nb::class_<MissingKeys>(m, "MissingKeys", "The keys of a batch that have no slot in their table, each once")
      .def_prop_ro("counts",
                   [](const MissingKeys& missing) {
                     std::vector<int64_t> counts;
                     for (const MissingKeys::Table& table : missing.tables()) counts.push_back(table.count);
                     return counts;
                   })
      .def(
          "keys",
          [](nb::handle_t<MissingKeys> self, size_t table) {
            const MissingKeys::Table& missing = nb::cast<const MissingKeys&>(self).tables().at(table);
            return nb::ndarray<nb::pytorch, int64_t, nb::ndim<1>>(missing.keys, {size_t(missing.count)}, self);
          },
          nb::arg("table"), "A view of one table's keys")
      .def("without", &keys_without_others, nb::arg("others"),
           "Keys of all tables, those of each in ascending order, without those at `others`: by table, the (address, "
           "count) of keys in order. And how many each table has left")
      .def(
          "count_after",
          [](const MissingKeys& missing, size_t table, size_t parts) {
            return parts == 0 ? 0 : missing.tables().at(table).count_after.at(parts - 1);
          },
          nb::arg("table"), nb::arg("parts"), "How many of them are in the first so many of the table's parts")
      .def(
          "positions",
          [](const MissingKeys& missing, size_t table, Vector<const bool> of) {
            const MissingKeys::Table& keys = missing.tables().at(table);
            int64_t count = 0;
            for (int64_t i = 0; i < keys.places_count; ++i) count += of.data()[keys.which[i]];
            return count;
          },
          nb::arg("table"), nb::arg("of"), Released(),
          "How many positions hold those of one table's keys that `of` has");

  nb::class_<Index>(m, "Index", "key -> slot for one table")
      .def(nb::init<>())
      .def("__len__", &Index::size)
      .def_prop_ro("bytes", &Index::bytes)
      .def_prop_ro("extent", &Index::extent)
      .def("bytes_after", &Index::bytes_after, nb::arg("more"))
      .def(
          "reserve",
          [](Index& index, int64_t more) {
            Status status;
            {
              nb::gil_scoped_release released;
              status = index.reserve(more);
            }
            raise(status);
          },
          nb::arg("more"))
      .def("shrink", &Index::shrink, nb::arg("budget"), Released())
      .def("entries", &entries, nb::arg("from_bucket"), nb::arg("to_bucket"), nb::arg("from_slot") = 0,
           "(keys, slots) of a range of buckets, without the slots below `from_slot`");

  m.def(
      "find",
      [](const Index& index, Integers keys, Vector<int32_t> slots, int threads) {
        int64_t missing;
        find({{&index, 0, int64_t(keys.shape(0))}}, {keys.data(), is_narrow(keys)}, slots_of(slots), &missing, threads);
        return int64_t(keys.shape(0)) - missing;
      },
      nb::arg("index"), nb::arg("keys"), nb::arg("slots"), nb::arg("threads"), Released(),
      "slots[i] of key i, or -1; how many have one");
  m.def(
      "keys_without",
      [](Vector<const int64_t> keys, const std::vector<Vector<const int64_t>>& others) {
        std::vector<int64_t> left;
        {
          nb::gil_scoped_release released;
          std::vector<std::span<const int64_t>> spans;
          for (const auto& other : others) spans.emplace_back(other.data(), other.shape(0));
          left = keys_without({keys.data(), keys.shape(0)}, spans);
        }
        return to_tensor(std::move(left));
      },
      nb::arg("keys"), nb::arg("others"), "Keys in ascending order, without those of others, which are in order");
}

}  // namespace shoal
