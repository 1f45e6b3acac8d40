#include <nanobind/stl/shared_ptr.h>

#include <exception>
#include <memory>
#include <new>

#include "base/cpu.h"
#include "base/ended_numbers.h"
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

// A lock as Python's `with` takes it. Python checks for signals between its instructions: an interrupt after a lock()
// and before its `try` would leave the lock held for ever, so enter and exit are each one call of the core. It does not
// record which threads are in it; several may enter it.
struct Guard {
  RwLock* lock;
  bool exclusive;

  void enter() const {
    bool entered = false;
    {
      nb::gil_scoped_release released;
      entered = lock->enter(exclusive);
    }
    if (!entered)
      raise(
          {Code::input,
           "wanted one call at a time of a thread; this one is inside of a call of the same tables, as where an object "
           "that is collected meanwhile uses them"});
  }
  void exit() const { lock->unlock(); }
};

// A Guard, and calls of its owner around it: `begin` before, `entered` once the lock is held, and `leave` after it,
// with the error that ends the block, or None. If `entered` returns False, the lock is released for `settle`, and
// entered again.
struct Held {
  Guard guard;
  nb::object owner;

  void enter() const {
    bool is_in = false;
    try {
      owner.attr("begin")();
      for (;;) {
        guard.enter();
        is_in = true;
        if (!owner.attr("entered")().is(nb::handle(Py_False))) return;
        guard.exit();
        is_in = false;
        owner.attr("settle")();
      }
    } catch (nb::python_error&) {
      if (is_in) guard.exit();
      owner.attr("leave")(nb::none());
      throw;
    }
  }
  void exit(const nb::object& error) const {
    guard.exit();
    owner.attr("leave")(error);
  }
};

// A tensor that holds a number, and notes when its memory goes. Other tensors may go with it.
static nb::ndarray<nb::pytorch, int64_t, nb::ndim<1>> held_number(const std::shared_ptr<EndedNumbers>& ended,
                                                                  int64_t number, nb::object others) {
  auto* note = new EndedNumbers::Note{number, ended};
  nb::capsule owner(note, [](void* p) noexcept { EndedNumbers::add(static_cast<EndedNumbers::Note*>(p)); });
  if (others.is_none()) return {&note->number, {1}, owner};
  return {&note->number, {1}, nb::make_tuple(owner, others)};
}

static void bind_locks(nb::module_& m) {
  nb::class_<Guard>(m, "Guard", "A lock for `with`, which no interrupt leaves held")
      .def("__enter__", &Guard::enter)
      .def(
          "__exit__", [](const Guard& guard, const nb::object&, const nb::object&, const nb::object&) { guard.exit(); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());
  nb::class_<Held>(m, "Held", "A Guard and what its owner does around it: `begin`, `entered`, `settle`, `leave(error)`")
      .def(
          "__init__",
          [](Held* held, const Guard& guard, nb::object owner) { new (held) Held{guard, std::move(owner)}; },
          nb::arg("guard"), nb::arg("owner"), nb::keep_alive<1, 2>())
      .def("__enter__", &Held::enter)
      .def(
          "__exit__",
          [](const Held& held, const nb::object&, const nb::object& error, const nb::object&) { held.exit(error); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());
  nb::class_<RwLock>(m, "RwLock", "Shared/exclusive lock that prefers writers")
      .def(nb::init<>())
      .def(
          "shared", [](RwLock& lock) { return Guard{&lock, false}; }, nb::keep_alive<0, 1>(),
          "Takes the shared lock: other threads may hold it too")
      .def("exclusive", [](RwLock& lock) { return Guard{&lock, true}; }, nb::keep_alive<0, 1>());
}

// [n, bytes] in pages of their own.
static nb::ndarray<nb::pytorch, uint8_t, nb::ndim<2>> mapped_rows(size_t n, size_t bytes) {
  auto pages = std::make_unique<Pages>();
  raise(Pages::map(n * bytes, pages.get()));
  void* data = pages->data();
  nb::capsule owner(pages.release(), [](void* p) noexcept { delete static_cast<Pages*>(p); });
  return {data, {n, bytes}, owner};
}

void bind_base(nb::module_& m) {
  nb::register_exception_translator(translate_bad_alloc);

  m.def("isas", &available_isas, "Instruction sets this build and machine have, lowest first");
  m.def("isa", [] { return isa_name(active_isa()); }, "The instruction set in use");
  m.def("set_isa", &set_isa, nb::arg("name"), "Use another one; false if it is not there");

  m.def("name_hash", [](const std::string& name) { return name_hash(name); }, nb::arg("name"));
  m.def("birth_stream", &birth_stream, nb::arg("seed"), nb::arg("name_hash"));
  m.def("rounding_stream", &rounding_stream, nb::arg("seed"), nb::arg("name_hash"));
  m.def("mapped_rows", &mapped_rows, nb::arg("n"), nb::arg("bytes"),
        "Memory for packed rows, which goes back to the system as soon as nothing refers to it");
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
  bind_locks(m);
  nb::class_<EndedNumbers>(m, "EndedNumbers", "Numbers whose tensors went")
      .def(nb::init<>())
      .def("hold", &held_number, nb::arg("number"), nb::arg("others") = nb::none(),
           nb::sig("def hold(self, number: int, others: Sequence[torch.Tensor] | None = None) -> torch.Tensor"),
           "A tensor of one number; its memory keeps other tensors for as long as it lives")
      .def_prop_ro("any", &EndedNumbers::any)
      .def(
          "take", [](EndedNumbers& ended, nb::list into) { ended.take([&](int64_t number) { into.append(number); }); },
          nb::arg("into"), nb::sig("def take(self, into: list[int]) -> None"),
          "Append those since the last call, all in one call that no interrupt divides");
}

}  // namespace shoal
