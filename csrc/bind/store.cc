#include "bind/bind.h"
#include "store/dram.h"

namespace shoal {

void bind_store(nb::module_& m) {
  nb::class_<DramStore>(m, "DramStore", "Rows in host memory")
      .def(nb::init<int32_t, Dtype, int32_t>(), nb::arg("dim"), nb::arg("dtype"), nb::arg("state_floats"))
      .def_prop_ro("rows", &DramStore::rows, nb::rv_policy::reference_internal)
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
      .def_prop_ro("sparse", &DramStore::sparse)
      .def_prop_ro("compact_from", &DramStore::compact_from)
      .def(
          "move",
          [](DramStore& store, Vector<int32_t> from, Vector<int32_t> to) {
            for (size_t i = 0; i < from.shape(0); ++i) store.move(slots_of(from)[i], slots_of(to)[i]);
          },
          nb::arg("from_slots"), nb::arg("to_slots"), Released())
      .def("release_tail", &DramStore::release_tail, Released());
}

}  // namespace shoal
