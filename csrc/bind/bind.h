// Python's view of the core: arguments in, a call with the GIL released, results out. What stands here beyond that is the
// form that crosses over: tensors as addresses, statuses as exceptions, one call for many tables. Algorithms are in the
// core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/status.h"

namespace shoal {

namespace nb = nanobind;

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Integers of 32 or 64 bits, as the batch has them.
using Integers = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Released = nb::call_guard<nb::gil_scoped_release>;

// Slots travel as int32 tensors: the same bits, and -1 is kNoSlot.
inline uint32_t* slots_of(const Vector<int32_t>& array) { return reinterpret_cast<uint32_t*>(array.data()); }
inline bool is_narrow(const Integers& array) { return array.dtype().bits == 32; }

// The exception of shoal.errors that the status stands for. Call with the GIL. REQUIRES: it is not ok.
nb::object error_of(const Status& status);
// Raises it, if it is not ok. Call with the GIL.
void raise(const Status& status);
void raise_error(const nb::object& error);

// A vector handed to Python without a copy.
template <typename T>
nb::ndarray<nb::pytorch, T, nb::ndim<1>> to_tensor(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {owned->data(), {owned->size()}, owner};
}

void bind_base(nb::module_& m);
void bind_file(nb::module_& m);
void bind_index(nb::module_& m);
void bind_store(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_lookup(nb::module_& m);
void bind_device(nb::module_& m);

}  // namespace shoal
