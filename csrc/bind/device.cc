#include <nanobind/stl/unique_ptr.h>

#include "bind/bind.h"
#include "device/captured.h"
#include "device/program.h"
#include "device/room.h"

namespace shoal {

namespace {

using Pair = std::tuple<int64_t, int32_t>;

Argument argument_of(const Pair& pair) { return {std::get<0>(pair), std::get<1>(pair)}; }

using Variables = nb::typed<nb::list, nb::object>;

std::vector<int64_t> numbers_of(const Variables& variables) {
  std::vector<int64_t> numbers;
  numbers.reserve(variables.size());
  for (const nb::handle variable : variables) {
    const bool is_number = PyLong_Check(variable.ptr());
    numbers.push_back(nb::cast<int64_t>(is_number ? nb::borrow(variable) : variable.attr("data_ptr")()));
  }
  return numbers;
}

template <typename Work>
Status released(const Work& work) {
  nb::gil_scoped_release released;
  return work();
}

void bind_room(nb::module_& m) {
  nb::class_<BatchSizes>(m, "BatchSizes", "What follows from how many keys each feature of a batch has")
      .def_ro("counts", &BatchSizes::counts)
      .def_ro("least", &BatchSizes::least)
      .def_ro("keys", &BatchSizes::keys)
      .def_ro("elements", &BatchSizes::elements, "Of the output, without pooling")
      .def_ro("births", &BatchSizes::births);
  nb::class_<Births>(m, "Births", "Most new keys of a batch, by table and by family")
      .def("of", [](const Births& births, size_t place) { return births.by_place.at(place); }, nb::arg("place"));
  nb::class_<Room>(m, "Room", "How many rows tables can have at most, and whether more fit. Families come after tables")
      .def(nb::init<std::vector<int32_t>, std::vector<int64_t>, size_t>(), nb::arg("family_of"), nb::arg("most_rows"),
           nb::arg("families"))
      .def("births", &Room::births, nb::arg("by_table"), "So many new keys of each table")
      .def("fits", &Room::fits, nb::arg("births"), nb::arg("batches") = 1)
      .def("take", &Room::take, nb::arg("births"), "Count a batch, if it surely fits")
      .def("add", &Room::add, nb::arg("births"))
      .def("most", &Room::most, nb::arg("place"))
      .def("fit", &Room::fit, nb::arg("place"))
      .def("set_fit", &Room::set_fit, nb::arg("place"), nb::arg("rows"))
      .def("recount", &Room::recount, nb::arg("place"))
      .def("set_whole", &Room::set_whole, nb::arg("family"), nb::arg("whole"))
      .def("lower", &Room::lower, nb::arg("table"), nb::arg("rows"))
      .def("new_rows", &Room::new_rows, nb::arg("births"), nb::arg("batches"))
      .def("sent", &Room::sent, nb::arg("copy"), nb::arg("kept"))
      .def(
          "heard",
          [](Room& room, int64_t copy, const Vector<const int32_t>& counted) { room.heard(copy, counted.data()); },
          nb::arg("copy"), nb::arg("counted"))
      .def("remembered", &Room::remembered);
  nb::class_<BatchParts>(m, "BatchParts", "How features meet tables: (feature, table, dim, whether it trains)")
      .def(
          "__init__",
          [](BatchParts* self, const std::vector<std::tuple<int32_t, int32_t, int64_t, bool>>& parts) {
            new (self) BatchParts();
            for (const auto& [source, table, dim, trains] : parts) self->parts.push_back({source, table, dim, trains});
          },
          nb::arg("parts"))
      .def("sizes", &BatchParts::sizes, nb::arg("counts"), nb::arg("room"));
}

}  // namespace

void bind_device(nb::module_& m) {
  bind_room(m);
  nb::class_<Program>(m, "Program", "Launches of compiled kernels. An argument is (fixed, number of a variable or -1)")
      .def(
          "__init__",
          [](Program* program, bool as_graph) {
            Driver driver;
            raise(find_driver(&driver));
            new (program) Program(driver, as_graph);
          },
          nb::arg("as_graph"), "as_graph: kept with the driver; its calls come one at a time")
      .def(
          "add_kernel",
          [](Program& program, uint64_t function, uint32_t threads, uint32_t shared_bytes,
             const std::tuple<Pair, Pair, Pair>& grid, const std::vector<Pair>& arguments) {
            std::vector<Argument> taken;
            for (const Pair& pair : arguments) taken.push_back(argument_of(pair));
            const auto& [x, y, z] = grid;
            program.add_kernel(function, threads, shared_bytes, {argument_of(x), argument_of(y), argument_of(z)},
                               std::move(taken));
          },
          nb::arg("function"), nb::arg("threads"), nb::arg("shared_bytes"), nb::arg("grid"), nb::arg("arguments"))
      .def(
          "add_fill",
          [](Program& program, const Pair& address, const Pair& words, uint32_t word) {
            program.add_fill(argument_of(address), argument_of(words), word);
          },
          nb::arg("address"), nb::arg("words"), nb::arg("word"))
      .def(
          "add_copy_to_host",
          [](Program& program, const Pair& to, const Pair& from, const Pair& bytes) {
            program.add_copy_to_host(argument_of(to), argument_of(from), argument_of(bytes));
          },
          nb::arg("to"), nb::arg("source"), nb::arg("bytes"))
      .def(
          "add_record", [](Program& program, const Pair& event) { program.add_record(argument_of(event)); },
          nb::arg("event"))
      .def(
          "run",
          [](Program& program, uint64_t stream, const Variables& variables) {
            const std::vector<int64_t> numbers = numbers_of(variables);
            Status status;
            {
              nb::gil_scoped_release released;
              status = program.run(stream, numbers);
            }
            raise(status);
          },
          nb::arg("stream"), nb::arg("variables"), "Numbers, and tensors, which stand for their addresses");

  nb::class_<CapturedGraph>(m, "CapturedGraph")
      .def(
          "start",
          [](const CapturedGraph& graph, uint64_t stream) { raise(released([&] { return graph.start(stream); })); },
          nb::arg("stream"));
  nb::class_<CaptureStream>(m, "CaptureStream", "A stream that nothing but captures is done on")
      .def_static("make",
                  [] {
                    Driver driver;
                    raise(find_driver(&driver));
                    std::unique_ptr<CaptureStream> stream;
                    raise(CaptureStream::make(driver, &stream));
                    return stream;
                  })
      .def_prop_ro("handle", &CaptureStream::handle)
      .def(
          "capture",
          [](const CaptureStream& stream, const nb::typed<nb::callable, nb::object()>& work) {
            std::unique_ptr<CapturedGraph> graph;
            std::exception_ptr thrown;
            const auto called = [&] {
              try {
                work();
              } catch (...) {
                thrown = std::current_exception();
                return Status(Code::device, "[device] what was to be captured raised an exception.");
              }
              return Status();
            };
            const Status status = stream.capture(called, &graph);
            if (thrown) std::rethrow_exception(thrown);
            raise(status);
            return graph;
          },
          nb::arg("work"), "The launches of a call as a graph. REQUIRES: this stream is torch's current one");
}

}  // namespace shoal
