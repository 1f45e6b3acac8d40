#include <nanobind/stl/shared_ptr.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "bind/bind.h"
#include "store/dram.h"
#include "store/ssd.h"

namespace shoal {

// Requests of all stores go through one of each kind.
static std::shared_ptr<Io> shared_io(const std::string& kind, int depth) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, std::weak_ptr<Io>> made;
  std::lock_guard lock(mutex);
  std::weak_ptr<Io>& kept = made[{kind, depth}];
  std::shared_ptr<Io> io = kept.lock();
  if (io == nullptr) {
    io = kind == "threads" ? make_io_threads(depth) : kind == "io_uring" ? make_uring(depth) : make_io(depth);
    if (io == nullptr) raise({Code::device, "[ssd] io_uring is not allowed here. Use 'threads', or leave it open."});
    kept = io;
  }
  return io;
}

// The exception of a read that failed. It has the keys of the rows that could not be read.
static nb::object error_of(const Status& status, std::vector<int64_t> lost) {
  nb::object error = error_of(status);
  if (!lost.empty()) error.attr("keys") = nb::cast(to_tensor(std::move(lost)));
  return error;
}

static void bind_ssd(nb::module_& m) {
  nb::class_<SsdStats>(m, "SsdStats")
      .def_ro("rows", &SsdStats::rows)
      .def_ro("capacity", &SsdStats::capacity)
      .def_ro("file_bytes", &SsdStats::file_bytes)
      .def_ro("index_bytes", &SsdStats::index_bytes)
      .def_ro("reads", &SsdStats::reads)
      .def_ro("read_bytes", &SsdStats::read_bytes)
      .def_ro("read_calls", &SsdStats::read_calls)
      .def_ro("read_nanoseconds", &SsdStats::read_nanoseconds)
      .def_ro("written_rows", &SsdStats::written_rows)
      .def_ro("written_bytes", &SsdStats::written_bytes)
      .def_ro("write_nanoseconds", &SsdStats::write_nanoseconds)
      .def_ro("collected_rows", &SsdStats::collected_rows)
      .def_ro("collected_bytes", &SsdStats::collected_bytes)
      .def_ro("damaged", &SsdStats::damaged);
  nb::class_<SsdStore>(m, "SsdStore", "Rows on disk, by key")
      .def_static(
          "open",
          [](const FilePath& directory, int64_t row_bytes, int64_t max_bytes, bool direct, const std::string& io,
             int depth) {
            std::unique_ptr<SsdStore> store;
            raise(SsdStore::open({directory, row_bytes, max_bytes, direct}, shared_io(io, depth), &store));
            // A forked child has neither its threads nor a right to its files.
            return std::shared_ptr<SsdStore>(store.release(), [maker = ::getpid()](SsdStore* made) {
              if (::getpid() == maker) delete made;
            });
          },
          nb::arg("directory"), nb::arg("row_bytes"), nb::arg("max_bytes"), nb::arg("direct"), nb::arg("io"),
          nb::arg("depth"))
      .def_prop_ro("capacity", &SsdStore::capacity)
      .def_prop_ro("rows", &SsdStore::rows)
      .def(
          "write",
          [](SsdStore& store, Vector<const int64_t> keys, Matrix<const uint8_t> rows) {
            Status status;
            {
              nb::gil_scoped_release released;
              status = store.write(keys.data(), reinterpret_cast<const char*>(rows.data()), int64_t(keys.shape(0)));
            }
            raise(status);
          },
          nb::arg("keys"), nb::arg("rows"))
      .def(
          "read",
          [](SsdStore& store, Vector<const int64_t> keys, Matrix<uint8_t> rows, Vector<bool> found) {
            Status status;
            std::vector<int64_t> lost;
            {
              nb::gil_scoped_release released;
              status = store.read(keys.data(), reinterpret_cast<char*>(rows.data()), found.data(),
                                  int64_t(keys.shape(0)), &lost);
            }
            if (!status.ok()) raise_error(error_of(status, std::move(lost)));
          },
          nb::arg("keys"), nb::arg("rows"), nb::arg("found"))
      .def(
          "contains",
          [](const SsdStore& store, Vector<const int64_t> keys, Vector<bool> found) {
            store.contains(keys.data(), found.data(), int64_t(keys.shape(0)));
          },
          nb::arg("keys"), nb::arg("found"), Released())
      .def(
          "erase",
          [](SsdStore& store, Vector<const int64_t> keys) { return store.erase(keys.data(), int64_t(keys.shape(0))); },
          nb::arg("keys"), Released())
      .def("keys", [](const SsdStore& store) { return to_tensor(store.keys()); })
      .def("clear", &SsdStore::clear, Released())
      .def("stats", &SsdStore::stats);
  m.def(
      "read_together",
      [](const std::vector<std::tuple<SsdStore*, uintptr_t, int64_t, uintptr_t, uintptr_t>>& given) {
        std::vector<SsdStore::Read> reads;
        for (auto [store, keys, n, rows, found] : given)
          reads.push_back({store, reinterpret_cast<const int64_t*>(keys), reinterpret_cast<char*>(rows),
                           reinterpret_cast<bool*>(found), n});
        {
          nb::gil_scoped_release released;
          SsdStore::read_together(&reads);
        }
        std::vector<nb::object> have;
        for (SsdStore::Read& read : reads)
          have.push_back(read.status.ok() ? nb::object(nb::int_(std::count(read.found, read.found + read.n, true)))
                                          : error_of(read.status, std::move(read.lost)));
        return have;
      },
      nb::arg("reads"),
      nb::sig("def read_together(reads: collections.abc.Sequence[tuple[SsdStore, int, int, int, int]]) -> "
              "list[int | Exception]"),
      "Read from several stores at a time, each as (store, address of keys, how many, address of rows, address of "
      "found); how many each has, or the exception of one that failed");
}

void bind_store(nb::module_& m) {
  bind_ssd(m);
  nb::class_<DramStore>(m, "DramStore", "Rows in host memory")
      .def(
          "__init__",
          [](DramStore* self, int32_t dim, Dtype dtype, int32_t state_floats, nb::bytes first_facts) {
            new (self) DramStore(dim, dtype, state_floats, {first_facts.c_str(), first_facts.size()});
          },
          nb::arg("dim"), nb::arg("dtype"), nb::arg("state_floats"), nb::arg("first_facts") = nb::bytes("", 0),
          "first_facts: the first values of what rows have besides state and score")
      .def_prop_ro("rows", &DramStore::rows, nb::rv_policy::reference_internal)
      .def_prop_ro("live", &DramStore::live, "Slots that are taken")
      .def_prop_ro("bytes", &DramStore::bytes)
      .def("bytes_after", &DramStore::bytes_after, nb::arg("more"))
      .def(
          "reserve", [](DramStore& store, int64_t more) { raise(store.reserve(more)); }, nb::arg("more"))
      .def(
          "take", [](DramStore& store, Vector<int32_t> out) { store.take(slots_of(out), int64_t(out.shape(0))); },
          nb::arg("out"), Released())
      .def(
          "give", [](DramStore& store, Vector<int32_t> slots) { store.give(slots_of(slots), int64_t(slots.shape(0))); },
          nb::arg("slots"), Released())
      .def(
          "keep_keys", [](DramStore& store) { raise(store.keep_keys()); }, "Know whose each slot is from here on")
      .def("forget_keys", &DramStore::forget_keys)
      .def(
          "name",
          [](DramStore& store, Vector<int32_t> slots, Vector<const int64_t> keys) {
            store.name(slots_of(slots), keys.data(), int64_t(keys.shape(0)));
          },
          nb::arg("slots"), nb::arg("keys"), Released(), "Say whose the slots are, if that is kept")
      .def_prop_ro("sparse", &DramStore::sparse)
      .def_prop_ro("compact_from", &DramStore::compact_from)
      .def("release_tail", &DramStore::release_tail, Released());
}

}  // namespace shoal
