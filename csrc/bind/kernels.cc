#include <nanobind/stl/optional.h>

#include <algorithm>
#include <string>

#include "bind/bind.h"
#include "kernels/bucket_order.h"
#include "kernels/hash_ids.h"
#include "kernels/pool.h"
#include "kernels/row_checks.h"
#include "kernels/rows_io.h"
#include "kernels/update.h"
#include "lookup/batch_lookup.h"

namespace shoal {

// A gradient, and the first of its columns that is the feature's.
struct BoundUpdateFeature {
  UpdateFeature feature;
  int64_t column;
};

// Rows of floats: address and stride.
using Gradient = std::tuple<uintptr_t, int64_t>;

static std::vector<UpdateFeature> with_gradients(const std::vector<BoundUpdateFeature>& bound,
                                                 const std::vector<Gradient>& grads) {
  std::vector<UpdateFeature> features;
  for (size_t i = 0; i < bound.size(); ++i) {
    // One gradient for all features, at their columns, or one for each.
    auto [address, stride] = grads.size() == 1 ? grads[0] : grads[i];
    features.push_back(bound[i].feature);
    features.back().grad = reinterpret_cast<const float*>(address) + bound[i].column;
    features.back().stride = stride;
  }
  return features;
}

// A table, and what it remembers of its backwards, which changes with its rows.
struct BoundUpdateTable {
  UpdateTable table;
  Backwards* backwards;
  // What the same backward left out in pieces before this update, which counts it; null if there were none.
  const Backwards* pieces = nullptr;
};

// (table, rows whose sum overflowed) of the tables where there were any.
static std::vector<std::tuple<int64_t, int64_t>> update_rows(const std::vector<const BoundUpdateTable*>& bound_tables,
                                                             const std::vector<BoundUpdateFeature>& bound,
                                                             const std::vector<Gradient>& grads, LookupBatch& bags,
                                                             int threads) {
  std::vector<UpdateTable> tables;
  for (const BoundUpdateTable* one : bound_tables) tables.push_back(one->table);
  std::vector<std::tuple<int64_t, int64_t>> left_out;
  left_out.reserve(tables.size());  // before rows change
  std::vector<UpdateCounts> counts = update(tables, with_gradients(bound, grads), bags.bags(), threads);
  for (size_t t = 0; t < counts.size(); ++t) {
    Backwards& backwards = *bound_tables[t]->backwards;
    if (const Backwards* pieces = bound_tables[t]->pieces) {
      counts[t].dropped += pieces->dropped;
      counts[t].nonfinite += pieces->skipped;
    }
    ++backwards.step;
    ++backwards.applied;
    backwards.dropped += counts[t].dropped;
    backwards.skipped += counts[t].nonfinite;
    if (counts[t].nonfinite) left_out.emplace_back(int64_t(t), counts[t].nonfinite);
  }
  bags.applied = true;
  return left_out;
}

// Address, first byte in the row's tail, bytes.
using BoundColumn = std::tuple<uintptr_t, int32_t, int32_t>;

static RowColumns columns_of(uintptr_t weights, const std::vector<BoundColumn>& tail) {
  RowColumns columns{reinterpret_cast<char*>(weights), {}};
  for (auto [address, from, bytes] : tail) columns.tail.push_back({reinterpret_cast<char*>(address), from, bytes});
  return columns;
}

void bind_kernels(nb::module_& m) {
  nb::enum_<InitKind>(m, "InitKind")
      .value("zeros", InitKind::zeros)
      .value("constant", InitKind::constant)
      .value("uniform", InitKind::uniform)
      .value("normal", InitKind::normal);
  nb::class_<Init>(m, "Init", "How rows are born")
      .def(
          "__init__",
          [](Init* self, InitKind kind, float a, float b, uint64_t stream) { new (self) Init{kind, a, b, stream}; },
          nb::arg("kind"), nb::arg("a") = 0.0f, nb::arg("b") = 0.0f, nb::arg("stream") = 0);
  nb::enum_<Pooling>(m, "Pooling").value("none", Pooling::none).value("sum", Pooling::sum).value("mean", Pooling::mean);
  nb::enum_<Optimizer>(m, "Optimizer")
      .value("sgd", Optimizer::sgd)
      .value("momentum", Optimizer::momentum)
      .value("adagrad", Optimizer::adagrad)
      .value("rowwise_adagrad", Optimizer::rowwise_adagrad)
      .value("adam", Optimizer::adam)
      .value("partial_rowwise_adam", Optimizer::partial_rowwise_adam)
      .value("ftrl", Optimizer::ftrl)
      .value("assign", Optimizer::assign);
  nb::enum_<Reduce>(m, "Reduce")
      .value("sum", Reduce::sum)
      .value("mean", Reduce::mean)
      .value("first", Reduce::first)
      .value("last", Reduce::last);

  nb::class_<ChangedRows>(m, "ChangedRows", "The rows that changed since they were taken last, by key or by slot")
      .def(nb::init<>())
      .def(
          "add", [](ChangedRows& self, Vector<const int64_t> keys) { self.add(keys.data(), int64_t(keys.shape(0))); },
          nb::arg("keys"))
      .def("take_keys", [](ChangedRows& self) { return to_tensor(self.take_keys()); })
      .def("take_slots", [](ChangedRows& self) {
        std::vector<uint32_t> slots = self.take_slots();
        return to_tensor(std::vector<int32_t>(slots.begin(), slots.end()));
      });
  nb::class_<Backwards>(m, "Backwards",
                        "What a table remembers of its backwards; it changes with the rows, in one call")
      .def(nb::init<>())
      .def_rw("step", &Backwards::step)
      .def_ro("applied", &Backwards::applied)
      .def_rw("dropped", &Backwards::dropped, "Gradients of erased rows")
      .def_ro("skipped", &Backwards::skipped, "Rows whose gradients overflowed");
  nb::class_<BoundUpdateTable>(m, "UpdateTable", "One table's part of a backward pass")
      .def(
          "__init__",
          [](BoundUpdateTable* self, const Rows& rows, uint64_t rounding_stream, Backwards& backwards) {
            auto* made = new (self) BoundUpdateTable{{}, &backwards};
            made->table.rows = &rows;
            made->table.rounding_stream = rounding_stream;
          },
          nb::arg("rows"), nb::arg("rounding_stream"), nb::arg("backwards"), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 4>())
      .def(
          "set",
          [](BoundUpdateTable& bound, Optimizer optimizer, Reduce reduce, float lr, const std::vector<double>& settings,
             float weight_decay, float shrink, float clip_value, float clip_norm, float max_norm) {
            UpdateTable& table = bound.table;
            if (settings.size() > std::size(table.hyper.setting))
              raise({Code::input, "an optimizer's kernel takes " + std::to_string(std::size(table.hyper.setting)) +
                                      " settings beside lr; got " + std::to_string(settings.size())});
            table.optimizer = optimizer;
            table.reduce = reduce;
            table.hyper.lr = lr;
            std::copy(settings.begin(), settings.end(), table.hyper.setting);
            table.weight_decay = weight_decay;
            table.shrink = shrink;
            table.clip_value = clip_value;
            table.clip_norm = clip_norm;
            table.max_norm = max_norm;
          },
          nb::arg("optimizer"), nb::arg("reduce"), nb::arg("lr"), nb::arg("settings"), nb::arg("weight_decay"),
          nb::arg("shrink"), nb::arg("clip_value"), nb::arg("clip_norm"), nb::arg("max_norm"))
      .def(
          "begin",
          [](BoundUpdateTable& bound, double score, uint32_t clock, float grad_scale, ChangedRows* changed) {
            bound.table.score = score;
            bound.table.clock = clock;
            bound.table.step = bound.backwards->step;
            bound.table.grad_scale = grad_scale;
            bound.table.changed = changed;
          },
          nb::arg("score"), nb::arg("clock"), nb::arg("grad_scale"), nb::arg("changed").none(), nb::keep_alive<1, 5>(),
          "What the next backward has of its own, and where it lists the rows that change")
      .def(
          "count_pieces", [](BoundUpdateTable& bound, const Backwards* pieces) { bound.pieces = pieces; },
          nb::arg("pieces").none(), nb::keep_alive<1, 2>(),
          "What pieces of the next backward left out before it is counted with it");
  nb::class_<BoundUpdateFeature>(m, "UpdateFeature", "The gradient of one feature's output")
      .def(
          "__init__",
          [](BoundUpdateFeature* self, int64_t table, int64_t source, int64_t slot_list, Pooling pooling,
             int64_t column) {
            new (self) BoundUpdateFeature{{table, source, pooling, nullptr, 0, slot_list}, column};
          },
          nb::arg("table"), nb::arg("source"), nb::arg("slot_list"), nb::arg("pooling"), nb::arg("column"));
  m.def("update", &update_rows, nb::arg("tables"), nb::arg("features"), nb::arg("grads"), nb::arg("bags"),
        nb::arg("threads"), Released(),
        "The optimizers' steps; gradients come as (address, stride). Rows, the tables' steps and that the batch's "
        "backward is applied change in this one call. Returns (number, rows whose sum overflowed) of the tables where "
        "there were any");
  m.def(
      "weight_gradients",
      [](const std::vector<const Rows*>& rows, const std::vector<BoundUpdateFeature>& bound,
         const std::vector<Gradient>& grads, const std::vector<Init>& missing, const LookupBatch& bags,
         Vector<float> out, int threads) {
        weight_gradients(rows, with_gradients(bound, grads), missing, bags.bags(), out.data(), threads);
      },
      nb::arg("rows"), nb::arg("features"), nb::arg("grads"), nb::arg("missing"), nb::arg("bags"), nb::arg("out"),
      nb::arg("threads"), Released());
  m.def(
      "all_finite",
      [](uintptr_t address, int64_t rows, int64_t columns, int64_t stride, int threads) {
        return all_finite(reinterpret_cast<const float*>(address), rows, columns, stride, threads);
      },
      nb::arg("address"), nb::arg("rows"), nb::arg("columns"), nb::arg("stride"), nb::arg("threads"), Released());

  m.def(
      "birth",
      [](const Rows& rows, const Init& init, Vector<const float> state, double score, uint32_t clock,
         Vector<const int64_t> keys, Vector<int32_t> slots, int threads) {
        birth(rows, init, state.data(), {score, clock}, keys.data(), slots_of(slots), int64_t(keys.shape(0)), threads);
      },
      nb::arg("rows"), nb::arg("init"), nb::arg("state"), nb::arg("score"), nb::arg("clock"), nb::arg("keys"),
      nb::arg("slots"), nb::arg("threads"), Released());
  m.def(
      "read_weights",
      [](const Rows& rows, const Init& missing, Vector<const int64_t> keys, Vector<int32_t> slots, Matrix<float> out,
         int threads) {
        read_weights(rows, missing, keys.data(), slots_of(slots), int64_t(keys.shape(0)), out.data(), threads);
      },
      nb::arg("rows"), nb::arg("missing"), nb::arg("keys"), nb::arg("slots"), nb::arg("out"), nb::arg("threads"),
      Released());
  m.def(
      "write_weights",
      [](const Rows& rows, Vector<int32_t> slots, Matrix<const float> values) {
        write_weights(rows, slots_of(slots), int64_t(slots.shape(0)), values.data());
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("values"), Released());
  m.def(
      "read_column",
      [](const Rows& rows, Vector<int32_t> slots, int32_t from, Vector<const uint8_t> missing, Matrix<uint8_t> out) {
        read_column(rows, slots_of(slots), int64_t(slots.shape(0)), from, int32_t(out.shape(1)),
                    reinterpret_cast<const char*>(missing.data()), reinterpret_cast<char*>(out.data()));
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("from_byte"), nb::arg("missing"), nb::arg("out"), Released(),
      "A column of the tails, as bytes; without a slot it reads `missing`");
  m.def(
      "write_column",
      [](const Rows& rows, Vector<int32_t> slots, int32_t from, Matrix<const uint8_t> values) {
        write_column(rows, slots_of(slots), int64_t(slots.shape(0)), from, int32_t(values.shape(1)),
                     reinterpret_cast<const char*>(values.data()));
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("from_byte"), nb::arg("values"), Released());
  m.def(
      "pack",
      [](const Rows& rows, Vector<int32_t> slots, Matrix<uint8_t> out, int threads) {
        pack(rows, slots_of(slots), int64_t(slots.shape(0)), reinterpret_cast<char*>(out.data()), threads);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("out"), nb::arg("threads"), Released());
  m.def(
      "unpack",
      [](const Rows& rows, Vector<int32_t> slots, Matrix<const uint8_t> values, uint32_t clock, int threads) {
        unpack(rows, slots_of(slots), int64_t(slots.shape(0)), reinterpret_cast<const char*>(values.data()), clock,
               threads);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("values"), nb::arg("clock"), nb::arg("threads"), Released(),
      "Whole rows to slots, where they are clean");
  m.def(
      "order_by_bucket",
      [](Vector<const int64_t> keys, uint64_t buckets, Vector<int64_t> out) {
        order_by_bucket(keys.data(), int64_t(keys.shape(0)), buckets, out.data());
      },
      nb::arg("keys"), nb::arg("buckets"), nb::arg("out"), Released(), "Where the keys are that come by bucket");
  m.def(
      "repeated_key",
      [](const std::vector<Vector<const int64_t>>& pieces) {
        nb::gil_scoped_release released;
        std::vector<std::span<const int64_t>> spans;
        for (const auto& piece : pieces) spans.emplace_back(piece.data(), piece.shape(0));
        return repeated_key(spans);
      },
      nb::arg("pieces"), "A key that comes more than once in these tensors; None where each comes once");
  m.def(
      "all_finite16",
      [](Vector<const int16_t> floats, uint16_t exponent) {
        return all_finite16({reinterpret_cast<const uint16_t*>(floats.data()), floats.shape(0)}, exponent);
      },
      nb::arg("floats"), nb::arg("exponent"), Released(),
      "Whether none of these 16-bit floats, given as their bits, is NaN or infinity; `exponent`: its bits in one");
  m.def(
      "look_by_bucket",
      [](Vector<const int64_t> keys, uint64_t buckets, uint64_t first, uint64_t last) {
        BucketedKeys found;
        {
          nb::gil_scoped_release released;
          found = look_by_bucket({keys.data(), keys.shape(0)}, buckets, first, last);
        }
        return std::make_tuple(found.misplaced, found.repeated, found.head, found.tail);
      },
      nb::arg("keys"), nb::arg("buckets"), nb::arg("first"), nb::arg("last"),
      "Of keys in the order of their buckets, which are in [first, last]: the position of one that is not, or -1; one "
      "that is repeated, or None; how many have the bucket of the first; where those begin that have that of the last");
  m.def(
      "hash_strings",
      [](uintptr_t data, int64_t bytes, uintptr_t offsets, bool are_wide, Vector<int64_t> out, int threads) {
        const auto* chars = reinterpret_cast<const char*>(data);
        int64_t n = int64_t(out.shape(0));
        if (are_wide)
          return hash_strings(chars, bytes, reinterpret_cast<const int64_t*>(offsets), n, out.data(), threads);
        return hash_strings(chars, bytes, reinterpret_cast<const int32_t*>(offsets), n, out.data(), threads);
      },
      nb::arg("data"), nb::arg("bytes"), nb::arg("offsets"), nb::arg("are_wide"), nb::arg("out"), nb::arg("threads"),
      Released(), "Ids of strings, by addresses of n + 1 offsets and of bytes; the first with wrong offsets, or -1");
  m.def(
      "hash_padded",
      [](uintptr_t data, int64_t width, Vector<int64_t> out, int threads) {
        hash_padded(reinterpret_cast<const char*>(data), width, int64_t(out.shape(0)), out.data(), threads);
      },
      nb::arg("data"), nb::arg("width"), nb::arg("out"), nb::arg("threads"), Released(),
      "Ids of strings of so many bytes each, with NULs at their end that do not count");
  m.def(
      "hash_utf32",
      [](uintptr_t data, int64_t width, Vector<int64_t> out, int threads) {
        const auto* points = reinterpret_cast<const uint32_t*>(data);
        return hash_utf32(points, width, int64_t(out.shape(0)), out.data(), threads);
      },
      nb::arg("data"), nb::arg("width"), nb::arg("out"), nb::arg("threads"), Released(),
      "Ids of strings of so many code points each, by their UTF-8; the first that has none, or -1");
  m.def(
      "export_rows",
      [](const Rows& rows, Vector<int32_t> slots, uintptr_t weights, const std::vector<BoundColumn>& tail,
         int threads) {
        export_rows(rows, slots_of(slots), int64_t(slots.shape(0)), columns_of(weights, tail), threads);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("weights"), nb::arg("tail"), nb::arg("threads"), Released(),
      "Whole rows to columns; those of the tail as (address, first byte in the tail, bytes)");
  m.def(
      "import_rows",
      [](const Rows& rows, Vector<int32_t> slots, uintptr_t weights, const std::vector<BoundColumn>& tail,
         Vector<const float> first_state, double score, uint32_t clock, bool changed, int threads) {
        import_rows(rows, slots_of(slots), int64_t(slots.shape(0)), columns_of(weights, tail), first_state.data(),
                    {score, clock}, changed ? kChanged | kDirty : kDirty, threads);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("weights"), nb::arg("tail"), nb::arg("first_state"), nb::arg("score"),
      nb::arg("clock"), nb::arg("changed"), nb::arg("threads"), Released(),
      "Columns to whole rows; columns that are not given are as at birth");
  m.def(
      "set_dirty",
      [](const Rows& rows, Vector<int32_t> slots, bool dirty) {
        (dirty ? set_flags : clear_flags)(rows, slots_of(slots), int64_t(slots.shape(0)), kDirty);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("dirty"), Released());
  m.def(
      "is_dirty",
      [](const Rows& rows, Vector<int32_t> slots, Vector<bool> out) {
        for (size_t i = 0; i < slots.shape(0); ++i) out.data()[i] = rows.flags(rows.tail(slots_of(slots)[i])) & kDirty;
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("out"), Released());
  m.def(
      "stamp",
      [](const Rows& rows, Vector<int32_t> slots, uint32_t clock) {
        stamp(rows, slots_of(slots), int64_t(slots.shape(0)), clock);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("clock"), Released());
  m.def(
      "is_changed",
      [](const Rows& rows, Vector<int32_t> slots, Vector<bool> out) {
        for (size_t i = 0; i < slots.shape(0); ++i)
          out.data()[i] = rows.flags(rows.tail(slots_of(slots)[i])) & kChanged;
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("out"), Released());
  m.def(
      "changed_keys",
      [](const Rows& rows, Vector<int32_t> slots) {
        std::vector<int64_t> keys;
        {
          nb::gil_scoped_release released;
          keys = changed_keys(rows, slots_of(slots), int64_t(slots.shape(0)));
        }
        return to_tensor(std::move(keys));
      },
      nb::arg("rows"), nb::arg("slots"), "The keys of those rows that are flagged changed; keys must be kept");
  m.def(
      "clear_changed",
      [](const Rows& rows, Vector<int32_t> slots) {
        clear_flags(rows, slots_of(slots), int64_t(slots.shape(0)), kChanged);
      },
      nb::arg("rows"), nb::arg("slots"), Released());
}

}  // namespace shoal
