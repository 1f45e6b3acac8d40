#include "lookup/lookup.h"

#include <nanobind/stl/optional.h>

#include <cstring>

#include "base/rwlock.h"
#include "base/thread_pool.h"
#include "bind/bags.h"
#include "index/batch.h"
#include "kernels/rows_io.h"
#include "lookup/arriving.h"
#include "lookup/placing.h"
#include "lookup/tracking.h"
#include "lookup/victims.h"
#include "store/dram.h"

namespace shoal {

BoundBags::BoundBags(Numbers keys, Numbers offsets, uintptr_t weights, int64_t features, int64_t copies)
    : features_(features), slot_count_(size_t(copies * keys.count)), slots_(slot_count_) {
  bags_.count = keys.count;
  bags_.batch = (offsets.count - 1) / std::max<int64_t>(features, 1);
  bags_.slots = slots_.get();
  point_to(keys, offsets, weights);
  raise(check(bags_, features_, bags_.count));
  bounds_ = bounds_now();
}

void BoundBags::bind_again(Numbers keys, Numbers offsets, uintptr_t weights) {
  bool same = keys.count == bags_.count && (offsets.count - 1) == features_ * bags_.batch;
  if (same) {
    point_to(keys, offsets, weights);
    raise(check(bags_, features_, bags_.count));
    same = bounds_now() == bounds_;
  }
  if (!same) raise({Code::input, "the backward wants the values and offsets of its forward"});
}

// Bytes of keys and of offsets.
static std::pair<size_t, size_t> sizes_of(const Bags& bags, int64_t features) {
  const size_t offsets = size_t(features * bags.batch + 1);
  return {size_t(bags.count) * (bags.narrow_keys ? 4 : 8), offsets * (bags.narrow_offsets ? 4 : 8)};
}

void BoundBags::begin_ahead() {
  auto [keys, offsets] = sizes_of(bags_, features_);
  kept_ = Kept<char>(keys + offsets);
  std::memcpy(kept_.get() + keys, bags_.offsets, offsets);
  std::fill_n(slots_.get(), slot_count_, kNoSlot);
}

bool BoundBags::has_bags_of(Numbers keys, Numbers offsets) const {
  if (keys.count != bags_.count || keys.narrow != bags_.narrow_keys || offsets.narrow != bags_.narrow_offsets ||
      offsets.count != features_ * bags_.batch + 1)
    return false;
  auto [of_keys, of_offsets] = sizes_of(bags_, features_);
  return !std::memcmp(kept_.get() + of_keys, reinterpret_cast<const void*>(offsets.address), of_offsets);
}

void BoundBags::point_to(Numbers keys, Numbers offsets, uintptr_t weights) {
  bags_.keys = reinterpret_cast<const void*>(keys.address);
  bags_.narrow_keys = keys.narrow;
  bags_.offsets = reinterpret_cast<const void*>(offsets.address);
  bags_.narrow_offsets = offsets.narrow;
  bags_.weights = reinterpret_cast<const float*>(weights);
}

std::vector<int64_t> BoundBags::bounds_now() const {
  std::vector<int64_t> bounds;
  for (int64_t f = 0; f <= features_; ++f) bounds.push_back(bags_.batch ? bags_.offset(f * bags_.batch) : 0);
  return bounds;
}

void BoundBags::count() {
  for (const Count& count : counts) {
    count.tally->lookups.fetch_add(count.lookups, std::memory_order_relaxed);
    count.tally->hits.fetch_add(count.hits, std::memory_order_relaxed);
  }
}

namespace {

using Numbers = std::tuple<uintptr_t, int64_t, bool>;
BoundBags::Numbers numbers(const Numbers& given) {
  return {std::get<0>(given), std::get<1>(given), std::get<2>(given)};
}

// The features of a batch, in one order, and the tables behind them.
struct BoundLookup {
  std::vector<LookupPart> parts;
  std::vector<int64_t> columns;
  std::vector<Tally*> tallies;
  std::vector<char> fetches;

  // `out` has `width` columns for all parts, or, if that is negative, the rows of one part behind the other's.
  std::vector<int64_t> run(BoundBags& batch, uintptr_t out, int64_t width, Dtype dtype, bool training, bool known,
                           int threads) {
    const Bags& bags = batch.bags();
    const int64_t bytes = dtype == Dtype::f32 ? 4 : 2;
    batch.parts = parts;
    batch.out_dtype = dtype;
    char* at = reinterpret_cast<char*>(out);
    for (size_t p = 0; p < parts.size(); ++p) {
      PoolFeature& feature = batch.parts[p].feature;
      const int64_t dim = feature.rows->dim;
      feature.out = width < 0 ? at : reinterpret_cast<char*>(out) + columns[p] * bytes;
      feature.stride = width < 0 ? dim : width;
      at += (batch.range(feature.source, 0).end - batch.range(feature.source, 0).begin) * dim * bytes;
      batch.parts[p].waits &= training || fetches[p];
    }
    Found found = lookup(batch.parts, bags, batch.slots(), known ? batch.kept_keys() : nullptr, dtype, threads);
    batch.are_kept = false;
    batch.counts.clear();
    for (size_t p = 0; p < parts.size(); ++p) {
      KeyRange keys = batch.range(parts[p].feature.source, 0);
      batch.counts.push_back({tallies[p], keys.end - keys.begin, keys.end - keys.begin - found.missing[p]});
    }
    batch.rest = std::move(found.rest);
    if (!batch.rest.empty()) return found.missing;
    batch.count();
    return {};
  }

  // `tables`: the parts of each table whose keys may be elsewhere.
  MissingKeys find(BoundBags& batch, RwLock& indexes, const std::vector<std::vector<size_t>>& tables,
                   int threads) const {
    batch.are_kept = true;
    const std::vector<Lacking> found =
        find_ahead(parts, batch.bags(), batch.bounds(), batch.kept_keys(), batch.slots(), indexes, threads);
    std::vector<std::vector<const Lacking*>> lacking(tables.size());
    for (size_t t = 0; t < tables.size(); ++t)
      for (size_t part : tables[t]) lacking[t].push_back(&found.at(part));
    return MissingKeys(lacking, batch.keys(), threads);
  }
};

MissingKeys missing_keys(BoundBags& batch, const std::vector<std::vector<std::tuple<int64_t, int64_t>>>& tables,
                         int threads) {
  std::vector<std::vector<KeyRange>> ranges(tables.size());
  for (size_t t = 0; t < tables.size(); ++t)
    for (auto [source, copy] : tables[t]) ranges[t].push_back(batch.range(source, copy));
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
  std::vector<Arriving> tables;
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
                                       const MissingKeys& missing, BoundBags& bags, int threads) {
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

  nb::class_<BoundBags>(
      m, "Bags",
      "A batch of bags of keys, and their slots. Tensors come as (address, count, whether int32), and "
      "the caller keeps them")
      .def(
          "__init__",
          [](BoundBags* self, const Numbers& keys, const Numbers& offsets, uintptr_t weights, int64_t features,
             int64_t copies) { new (self) BoundBags(numbers(keys), numbers(offsets), weights, features, copies); },
          nb::arg("keys"), nb::arg("offsets"), nb::arg("weights"), nb::arg("features"), nb::arg("copies"))
      .def(
          "bind_again",
          [](BoundBags& self, const Numbers& keys, const Numbers& offsets, uintptr_t weights) {
            self.bind_again(numbers(keys), numbers(offsets), weights);
          },
          nb::arg("keys"), nb::arg("offsets"), nb::arg("weights"))
      .def("begin_ahead", &BoundBags::begin_ahead, Released(),
           "Before slots are found ahead of the lookup: keep the offsets as they are now, and know no slot")
      .def(
          "has_bags_of",
          [](const BoundBags& self, const Numbers& keys, const Numbers& offsets) {
            return self.has_bags_of(numbers(keys), numbers(offsets));
          },
          nb::arg("keys"), nb::arg("offsets"), "Whether these are as many keys, in bags as they were when it was found")
      .def_prop_ro("bounds", &BoundBags::bounds, "Where each feature's keys begin, and the end")
      .def_rw("applied", &BoundBags::applied, "Whether the batch's backward is done")
      .def("missing", &missing_keys, nb::arg("tables"), nb::arg("threads"), Released(),
           "For every table, given as the (source, copy) of its parts, the keys without a slot")
      .def(
          "fill",
          [](BoundBags& self, const MissingKeys& missing, size_t table, Vector<int32_t> slots_of_keys) {
            missing.fill(table, slots_of(slots_of_keys), self.slots());
          },
          nb::arg("missing"), nb::arg("table"), nb::arg("slots_of_keys"), Released(),
          "Give every position of a table the slot that its key got")
      .def(
          "finish",
          [](BoundBags& self, int threads) {
            pool_rest(self.parts, self.rest, self.bags(), self.slots(), self.out_dtype, threads);
            self.rest.clear();
            self.count();
          },
          nb::arg("threads"), Released(), "Pool what waited for births")
      .def(
          "touch",
          [](BoundBags& self, const Rows& rows, int64_t source, int64_t copy, double score, ChangedRows* changed) {
            KeyRange keys = self.range(source, copy);
            touch(rows, self.slots() + keys.shift + keys.begin, keys.end - keys.begin, score, changed);
          },
          nb::arg("rows"), nb::arg("source"), nb::arg("copy"), nb::arg("score"), nb::arg("changed").none(), Released(),
          "Raise the scores of one part's rows")
      .def(
          "stamp",
          [](BoundBags& self, const Rows& rows, int64_t source, int64_t copy, uint32_t clock) {
            KeyRange keys = self.range(source, copy);
            stamp(rows, self.slots() + keys.shift + keys.begin, keys.end - keys.begin, clock);
          },
          nb::arg("rows"), nb::arg("source"), nb::arg("copy"), nb::arg("clock"), Released(),
          "Say that one part's rows were used now")
      .def(
          "pin",
          [](BoundBags& self, Pins& pins, int64_t source, int64_t copy) {
            KeyRange keys = self.range(source, copy);
            pins.add(self.slots() + keys.shift + keys.begin, keys.end - keys.begin);
          },
          nb::arg("pins"), nb::arg("source"), nb::arg("copy"), Released(), "Pin one part's rows");

  nb::class_<BoundLookup>(m, "Lookup", "The features of a batch, and how each reads its table")
      .def(nb::init<>())
      .def(
          "add",
          [](BoundLookup& self, const Index& index, const Rows& rows, Tally& tally, int64_t source, int64_t copy,
             Pooling pooling, bool silent, const Init& missing, int64_t column, bool trains, bool fetches) {
            const bool waits = trains || fetches;
            self.parts.push_back({&index, {&rows, source, pooling, silent, missing, nullptr, 0, copy}, waits});
            self.fetches.push_back(fetches);
            self.columns.push_back(column);
            self.tallies.push_back(&tally);
          },
          nb::arg("index"), nb::arg("rows"), nb::arg("tally"), nb::arg("source"), nb::arg("copy"), nb::arg("pooling"),
          nb::arg("silent"), nb::arg("missing"), nb::arg("column"), nb::arg("trains"), nb::arg("fetches"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "`trains`: in training keys without a row get one; `fetches`: they may have one below")
      .def("find", &BoundLookup::find, nb::arg("bags"), nb::arg("indexes"), nb::arg("tables"), nb::arg("threads"),
           Released(),
           "Slots alone, beside whoever changes indexes; of the tables, each given as the numbers of its parts, the "
           "keys "
           "without one")
      .def(
          "run", &BoundLookup::run, nb::arg("bags"), nb::arg("out"), nb::arg("width"), nb::arg("dtype"),
          nb::arg("training"), nb::arg("known"), nb::arg("threads"), Released(),
          "Slots, unless they are known, then rows to the output at an address; if some rows are to be born first, how "
          "many each part lacks");
}

}  // namespace shoal
