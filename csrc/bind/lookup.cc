#include <nanobind/stl/optional.h>

#include <utility>

#include "base/rwlock.h"
#include "base/thread_pool.h"
#include "bind/bind.h"
#include "index/batch.h"
#include "kernels/rows_io.h"
#include "lookup/arrivals.h"
#include "lookup/batch_lookup.h"
#include "lookup/placing.h"
#include "lookup/tracking.h"
#include "lookup/victims.h"
#include "store/dram.h"

namespace shoal {

namespace {

using Numbers = std::tuple<uintptr_t, int64_t, bool>;
LookupBatch::Numbers numbers(const Numbers& given) {
  return {reinterpret_cast<const void*>(std::get<0>(given)), std::get<1>(given), std::get<2>(given)};
}
const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

MissingKeys missing_keys(LookupBatch& batch, const std::vector<std::vector<std::tuple<int64_t, int64_t>>>& tables,
                         int threads) {
  std::vector<std::vector<KeyRange>> ranges(tables.size());
  for (size_t t = 0; t < tables.size(); ++t)
    for (auto [source, slot_list] : tables[t]) ranges[t].push_back(batch.range(source, slot_list));
  return MissingKeys(ranges, batch.keys(), batch.slots(), threads);
}

}  // namespace

static void bind_victims(nb::module_& m) {
  nb::class_<Pins>(m, "Pins", "Slots of one table's rows that must stay")
      .def(nb::init<const Rows&>(), nb::arg("rows"))
      .def(
          "add", [](Pins& pins, Vector<int32_t> slots) { pins.add(slots_of(slots), int64_t(slots.shape(0))); },
          nb::arg("slots"), Released())
      .def(
          "has",
          [](const Pins& pins, Vector<int32_t> slots) {
            auto* has = new bool[slots.shape(0)];
            for (size_t i = 0; i < slots.shape(0); ++i) has[i] = pins.has(slots_of(slots)[i]);
            nb::capsule owner(has, [](void* p) noexcept { delete[] static_cast<bool*>(p); });
            return nb::ndarray<nb::pytorch, bool, nb::ndim<1>>(has, {slots.shape(0)}, owner);
          },
          nb::arg("slots"), "Whether each is pinned")
      .def_prop_ro("count", &Pins::count);
  nb::class_<Victims>(m, "Victims", "Which rows leave memory when others need their place")
      .def(nb::init<>())
      .def(
          "choose",
          [](Victims& victims, const Index& index, const Rows& rows, uint32_t clock, const Pins& pins, int64_t n) {
            Victims::Chosen chosen;
            {
              nb::gil_scoped_release released;
              chosen = victims.choose(index, rows, clock, pins, n);
            }
            std::vector<int32_t> slots(chosen.slots.begin(), chosen.slots.end());
            return std::make_tuple(to_tensor(std::move(chosen.keys)), to_tensor(std::move(slots)), chosen.dirty);
          },
          nb::arg("index"), nb::arg("rows"), nb::arg("clock"), nb::arg("pins"), nb::arg("n"),
          "(keys, slots, how many of the first are dirty) of up to n rows that are not pinned");
}

static void arrive_all(const std::vector<std::tuple<Index*, DramStore*>>& given,
                       const std::vector<Vector<const int64_t>>& keys, const std::vector<Vector<int32_t>>& slots,
                       int threads) {
  std::vector<Arrival> tables;
  for (size_t i = 0; i < given.size(); ++i)
    tables.push_back({std::get<0>(given[i]), std::get<1>(given[i]), keys.at(i).data(), int64_t(keys[i].shape(0)),
                      slots_of(slots.at(i))});
  Status status;
  {
    nb::gil_scoped_release released;
    status = arrive(tables, threads);
  }
  raise(status);
}

// Each table as (index, store, address of keys, address of rows, how many, clock, its number among the missing keys).
using PlacingTable = std::tuple<Index*, DramStore*, uintptr_t, uintptr_t, int64_t, uint32_t, size_t>;

static std::vector<int64_t> place_rows(const std::vector<PlacingTable>& given, RwLock& indexes,
                                       const MissingKeys& missing, LookupBatch& bags, int threads) {
  std::vector<Placing> tables;
  for (auto [index, store, keys, rows, n, clock, table] : given) {
    missing.tables().at(table);
    tables.push_back(
        {index, store, reinterpret_cast<const int64_t*>(keys), reinterpret_cast<const char*>(rows), n, clock, table});
  }
  place(&tables, indexes, missing, bags.slots(), threads);
  std::vector<int64_t> came;
  for (const Placing& table : tables) came.push_back(table.status.ok() ? table.came : -1);
  return came;
}

void bind_lookup(nb::module_& m) {
  bind_victims(m);
  m.def("begin_tracking", &begin_tracking, nb::arg("index"), nb::arg("rows"), nb::arg("threads"), Released(),
        "Write every row's key to its slot, and say that the row did not change");
  m.def("arrive", &arrive_all, nb::arg("tables"), nb::arg("keys"), nb::arg("slots"), nb::arg("threads"),
        "Give the absent keys of all tables, each as (index, store), their slots, or none; the stores have room");
  m.def(
      "leave",
      [](Index& index, DramStore& store, Vector<const int64_t> keys) {
        leave(&index, &store, keys.data(), int64_t(keys.shape(0)));
      },
      nb::arg("index"), nb::arg("store"), nb::arg("keys"), Released(),
      "Take keys out and free their slots, where they are there; takes no memory");
  m.def(
      "relocate",
      [](Index& index, DramStore& store, Vector<const int64_t> keys, Vector<int32_t> slots) {
        relocate(&index, &store, keys.data(), slots_of(slots), int64_t(keys.shape(0)));
      },
      nb::arg("index"), nb::arg("store"), nb::arg("keys"), nb::arg("slots"), Released(),
      "Move the rows of keys from their slots to the lowest free ones");
  nb::class_<Limbo>(m, "Limbo", "Slots of erased rows that leases may hold")
      .def(nb::init<>())
      .def_prop_ro("any", &Limbo::any)
      .def(
          "erase",
          [](Limbo& limbo, Index& index, DramStore& store, Vector<const int64_t> keys, int64_t lease) {
            limbo.erase(&index, store, keys.data(), int64_t(keys.shape(0)), lease);
          },
          nb::arg("index"), nb::arg("store"), nb::arg("keys"), nb::arg("lease"), Released(),
          "Take keys out; their rows are flagged erased, and their slots wait for that lease and those before it")
      .def("free", &Limbo::free, nb::arg("store"), nb::arg("oldest").none(), Released(),
           "Free the slots that no lease can hold any more; `oldest`: of those alive");
  m.def("place", &place_rows, nb::arg("tables"), nb::arg("indexes"), nb::arg("missing"), nb::arg("bags"),
        nb::arg("threads"), Released(),
        "Put rows that were read ahead in memory, where they are not there yet, and say to their batch where; how many "
        "came of each table, or -1 where memory was refused");
  nb::class_<Tally>(m, "Tally", "Keys looked up, those that had a row in memory, and those that had one below")
      .def(nb::init<>())
      .def_prop_ro("lookups", [](const Tally& tally) { return tally.lookups.load(); })
      .def_prop_ro("hits", [](const Tally& tally) { return tally.hits.load(); })
      .def_prop_ro("fetched", [](const Tally& tally) { return tally.fetched.load(); })
      .def(
          "add",
          [](Tally& tally, int64_t lookups, int64_t hits, int64_t fetched) {
            tally.lookups.fetch_add(lookups, std::memory_order_relaxed);
            tally.hits.fetch_add(hits, std::memory_order_relaxed);
            tally.fetched.fetch_add(fetched, std::memory_order_relaxed);
          },
          nb::arg("lookups") = 0, nb::arg("hits") = 0, nb::arg("fetched") = 0);

  nb::class_<LookupBatch>(
      m, "Bags",
      "A batch of bags of keys, and their slots. Tensors come as (address, count, whether int32), and "
      "the caller keeps them")
      .def(
          "__init__",
          [](LookupBatch* self, const Numbers& keys, const Numbers& offsets, uintptr_t weights, int64_t features,
             int64_t slot_lists) {
            LookupBatch made(numbers(keys), numbers(offsets), floats(weights), features, slot_lists);
            raise(made.check());
            new (self) LookupBatch(std::move(made));
          },
          nb::arg("keys"), nb::arg("offsets"), nb::arg("weights"), nb::arg("features"), nb::arg("slot_lists"))
      .def(
          "bind_again",
          [](LookupBatch& self, const Numbers& keys, const Numbers& offsets, uintptr_t weights) {
            raise(self.bind_again(numbers(keys), numbers(offsets), floats(weights)));
          },
          nb::arg("keys"), nb::arg("offsets"), nb::arg("weights"))
      .def("begin_ahead", &LookupBatch::begin_ahead, Released(),
           "Before slots are found ahead of the lookup: keep the offsets as they are now, and know no slot")
      .def(
          "has_bags_of",
          [](const LookupBatch& self, const Numbers& keys, const Numbers& offsets) {
            return self.has_bags_of(numbers(keys), numbers(offsets));
          },
          nb::arg("keys"), nb::arg("offsets"), "Whether these are as many keys, in bags as they were when it was found")
      .def_prop_ro("bounds", &LookupBatch::bounds, "Where each feature's keys begin, and the end")
      .def_rw("applied", &LookupBatch::applied, "Whether the batch's backward is done")
      .def("missing", &missing_keys, nb::arg("tables"), nb::arg("threads"), Released(),
           "For every table, given as the (source, slot list) of its parts, the keys without a slot")
      .def(
          "fill",
          [](LookupBatch& self, const MissingKeys& missing, size_t table, Vector<int32_t> slots_of_keys) {
            missing.fill(table, slots_of(slots_of_keys), self.slots());
          },
          nb::arg("missing"), nb::arg("table"), nb::arg("slots_of_keys"), Released(),
          "Give every position of a table the slot that its key got")
      .def("finish", &LookupBatch::finish, nb::arg("threads"), Released(), "Pool what waited for births")
      .def(
          "touch",
          [](LookupBatch& self, const Rows& rows, int64_t source, int64_t slot_list, double score,
             ChangedRows* changed) {
            KeyRange keys = self.range(source, slot_list);
            touch(rows, self.slots() + keys.shift + keys.begin, keys.end - keys.begin, score, changed);
          },
          nb::arg("rows"), nb::arg("source"), nb::arg("slot_list"), nb::arg("score"), nb::arg("changed").none(),
          Released(), "Raise the scores of one part's rows")
      .def(
          "stamp",
          [](LookupBatch& self, const Rows& rows, int64_t source, int64_t slot_list, uint32_t clock) {
            KeyRange keys = self.range(source, slot_list);
            stamp(rows, self.slots() + keys.shift + keys.begin, keys.end - keys.begin, clock);
          },
          nb::arg("rows"), nb::arg("source"), nb::arg("slot_list"), nb::arg("clock"), Released(),
          "Say that one part's rows were used now")
      .def(
          "pin",
          [](LookupBatch& self, Pins& pins, int64_t source, int64_t slot_list) {
            KeyRange keys = self.range(source, slot_list);
            pins.add(self.slots() + keys.shift + keys.begin, keys.end - keys.begin);
          },
          nb::arg("pins"), nb::arg("source"), nb::arg("slot_list"), Released(), "Pin one part's rows");

  nb::class_<BatchLookup>(m, "Lookup", "The features of a batch, and how each reads its table")
      .def(nb::init<>())
      .def(
          "add",
          [](BatchLookup& self, const Index& index, const Rows& rows, Tally& tally, int64_t source, int64_t slot_list,
             Pooling pooling, bool silent, const Init& missing, int64_t column, bool trains, bool fetches) {
            const PoolFeature pool{&rows, source, pooling, silent, missing, nullptr, 0, slot_list};
            self.add({&index, pool, &tally, column, trains, fetches});
          },
          nb::arg("index"), nb::arg("rows"), nb::arg("tally"), nb::arg("source"), nb::arg("slot_list"),
          nb::arg("pooling"), nb::arg("silent"), nb::arg("missing"), nb::arg("column"), nb::arg("trains"),
          nb::arg("fetches"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "`trains`: in training keys without a row get one; `fetches`: they may have one below")
      .def("find", &BatchLookup::find, nb::arg("bags"), nb::arg("indexes"), nb::arg("tables"), nb::arg("threads"),
           Released(),
           "Find slots only; other threads may change indexes meanwhile. Returns, for the tables, each given as the "
           "numbers of its parts, the keys without a slot")
      .def(
          "run",
          [](const BatchLookup& self, LookupBatch& batch, uintptr_t out, int64_t width, Dtype dtype, bool training,
             bool known, int threads) {
            return self.run(batch, reinterpret_cast<char*>(out), width, dtype, training, known, threads);
          },
          nb::arg("bags"), nb::arg("out"), nb::arg("width"), nb::arg("dtype"), nb::arg("training"), nb::arg("known"),
          nb::arg("threads"), Released(),
          "Slots, unless they are known, then rows to the output at an address; if some rows are to be born first, how "
          "many each part lacks");
}

}  // namespace shoal
