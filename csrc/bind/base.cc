#include <exception>
#include <new>

#include "base/cpu.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/normal_table.h"
#include "base/rows.h"
#include "base/rwlock.h"
#include "bind/bind.h"

namespace shoal {

static constexpr const char* kOutOfMemoryAdvice =
    ". Free memory, use smaller batches, or bound the tables with Table(tiers=[Dram(...)]).";

nb::object error_of(const Status& status) {
  const char* name = status.code() == Code::memory     ? "OutOfMemoryError"
                     : status.code() == Code::capacity ? "CapacityError"
                     : status.code() == Code::device   ? "DeviceError"
                     : status.code() == Code::storage  ? "StorageError"
                                                       : "InputError";
  nb::object type = nb::module_::import_("shoal.errors").attr(name);
  std::string message = status.message();
  if (status.code() == Code::memory) message += kOutOfMemoryAdvice;
  // A path in it may be any bytes.
  nb::object text = nb::steal(PyUnicode_DecodeUTF8(message.data(), Py_ssize_t(message.size()), "backslashreplace"));
  if (!text.is_valid()) throw nb::python_error();
  return type(text);
}

void raise(const Status& status) {
  if (!status.ok()) raise_error(error_of(status));
}

void raise_error(const nb::object& error) {
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

// Out of C++ it would be a bare MemoryError("std::bad_alloc"). Nothing here throws: memory is short.
static void translate_bad_alloc(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    PyObject* errors = PyImport_ImportModule("shoal.errors");
    PyObject* type = errors ? PyObject_GetAttrString(errors, "OutOfMemoryError") : nullptr;
    if (type) PyErr_Format(type, "the operating system refused memory for a call's own use%s", kOutOfMemoryAdvice);
    Py_XDECREF(type);
    Py_XDECREF(errors);
  }
}

// Large memory from the reusable buffers, which holds anything.
static nb::capsule kept_memory(size_t bytes) {
  void* data = Buffers::instance().acquire(bytes);
  if (!data) raise({Code::memory, "the operating system refused " + std::to_string(bytes) + " bytes for an output"});
  return nb::capsule(data, [](void* p) noexcept { Buffers::instance().release(p); });
}

// [rows, columns] of 2 or 4-byte floats.
static nb::object output(size_t rows, size_t columns, Dtype dtype) {
  nb::capsule owner = kept_memory(rows * columns * (dtype == Dtype::f32 ? 4 : 2));
  nb::dlpack::dtype type{
      static_cast<uint8_t>(dtype == Dtype::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float),
      static_cast<uint8_t>(dtype == Dtype::f32 ? 32 : 16), 1};
  return nb::cast(nb::ndarray<nb::pytorch>(owner.data(), {rows, columns}, owner, {}, type));
}

static nb::ndarray<nb::memview, uint8_t, nb::ndim<1>> buffer(size_t bytes) {
  nb::capsule owner = kept_memory(bytes);
  return nb::ndarray<nb::memview, uint8_t, nb::ndim<1>>(owner.data(), {bytes}, owner);
}

void bind_base(nb::module_& m) {
  nb::register_exception_translator(translate_bad_alloc);

  m.def("isas", &available_isas, "Instruction sets this build and machine have, lowest first");
  m.def("isa", [] { return isa_name(active_isa()); }, "The instruction set in use");
  m.def("set_isa", &set_isa, nb::arg("name"), "Use another one; false if it is not there");

  m.def("name_hash", [](const std::string& name) { return name_hash(name); }, nb::arg("name"));
  m.def("birth_stream", &birth_stream, nb::arg("seed"), nb::arg("name_hash"));
  m.def("rounding_stream", &rounding_stream, nb::arg("seed"), nb::arg("name_hash"));
  m.def("buffer", &buffer, nb::arg("bytes"), "Memory that holds anything, and is used again for others later");
  m.def(
      "buckets",
      [](Vector<const int64_t> keys, uint64_t buckets, Vector<int64_t> out) {
        for (size_t i = 0; i < keys.shape(0); ++i)
          out.data()[i] = static_cast<int64_t>(bucket_of(keys.data()[i], buckets));
      },
      nb::arg("keys"), nb::arg("buckets"), nb::arg("out"), Released());
  m.def(
      "normal_table", [] { return to_tensor(std::vector<float>(kNormalTable, kNormalTable + kNormalKnots)); },
      "The knots of the inverse normal CDF");

  nb::enum_<Dtype>(m, "Dtype").value("float32", Dtype::f32).value("float16", Dtype::f16).value("bfloat16", Dtype::bf16);
  nb::class_<Rows>(m, "Rows", "Where a table's rows lie; belongs to its store");
  m.def("output", &output, nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"));

  nb::class_<RwLock>(m, "RwLock", "Shared/exclusive lock that prefers writers")
      .def(nb::init<>())
      .def("lock_shared", &RwLock::lock_shared, Released())
      .def("lock", &RwLock::lock, Released())
      .def("unlock", &RwLock::unlock);
}

}  // namespace shoal
