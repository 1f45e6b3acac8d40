#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/bind.h"
#include "kernels/pool.h"
#include "kernels/rows_io.h"
#include "kernels/update.h"

namespace shoal {

// A batch and the arrays it points into.
struct BoundBags {
  Bags bags;
  Integers keys, offsets;
  Vector<int32_t> slots;
  std::optional<Vector<const float>> weights;

  BoundBags(Integers k, Integers o, int64_t batch, Vector<int32_t> s, std::optional<Vector<const float>> w)
      : keys(k), offsets(o), slots(s), weights(w) {
    bags.keys = keys.data();
    bags.offsets = offsets.data();
    bags.narrow_keys = is_narrow(keys);
    bags.narrow_offsets = is_narrow(offsets);
    bags.batch = batch;
    bags.count = int64_t(keys.shape(0));
    bags.slots = slots_of(slots);
    bags.weights = weights ? weights->data() : nullptr;
  }
};

// A feature and the first of its columns in a shared output.
struct BoundPoolFeature {
  PoolFeature feature;
  int64_t column;
};
struct BoundUpdateFeature {
  UpdateFeature feature;
  int64_t column;
};

using AnyMatrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Gradient2d = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

static Dtype dtype_of(const AnyMatrix& array) {
  if (array.dtype().bits == 32) return Dtype::f32;
  return array.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat) ? Dtype::bf16 : Dtype::f16;
}

static void pool_columns(const std::vector<BoundPoolFeature>& bound, const BoundBags& bags, AnyMatrix out,
                         int threads) {
  Dtype dtype = dtype_of(out);
  std::vector<PoolFeature> features;
  for (const BoundPoolFeature& b : bound) {
    features.push_back(b.feature);
    features.back().out = static_cast<char*>(out.data()) + b.column * (dtype == Dtype::f32 ? 4 : 2);
    features.back().stride = int64_t(out.shape(1));
  }
  pool(features, bags.bags, dtype, threads);
}

static void pool_each(const std::vector<BoundPoolFeature>& bound, const BoundBags& bags,
                      const std::vector<AnyMatrix>& outs, int threads) {
  std::vector<PoolFeature> features;
  for (size_t i = 0; i < bound.size(); ++i) {
    features.push_back(bound[i].feature);
    features.back().out = static_cast<char*>(outs[i].data());
    features.back().stride = int64_t(outs[i].shape(1));
  }
  if (!outs.empty()) pool(features, bags.bags, dtype_of(outs[0]), threads);
}

static std::vector<UpdateFeature> with_gradients(const std::vector<BoundUpdateFeature>& bound,
                                                 const std::vector<Gradient2d>& grads) {
  std::vector<UpdateFeature> features;
  for (size_t i = 0; i < bound.size(); ++i) {
    // One gradient for all features, at their columns, or one for each.
    const Gradient2d& grad = grads.size() == 1 ? grads[0] : grads[i];
    features.push_back(bound[i].feature);
    features.back().grad = grad.data() + bound[i].column;
    features.back().stride = grad.stride(0);
  }
  return features;
}

static std::vector<std::tuple<int64_t, int64_t, int64_t>> update_rows(const std::vector<UpdateTable>& tables,
                                                                      const std::vector<BoundUpdateFeature>& bound,
                                                                      const std::vector<Gradient2d>& grads,
                                                                      const BoundBags& bags, int threads) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> counts;
  for (const UpdateCounts& table : update(tables, with_gradients(bound, grads), bags.bags, threads))
    counts.emplace_back(table.rows, table.dropped, table.nonfinite);
  return counts;
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

  nb::class_<BoundBags>(m, "Bags", "A batch of bags of keys, and their slots")
      .def(nb::init<Integers, Integers, int64_t, Vector<int32_t>, std::optional<Vector<const float>>>(),
           nb::arg("keys"), nb::arg("offsets"), nb::arg("batch"), nb::arg("slots"), nb::arg("weights") = nb::none())
      .def(
          "check",
          [](const BoundBags& bags, int64_t features) {
            raise(check(bags.bags, features, int64_t(bags.keys.shape(0))));
          },
          nb::arg("features"));

  nb::class_<BoundPoolFeature>(m, "PoolFeature", "How one feature of a batch reads one table")
      .def(
          "__init__",
          [](BoundPoolFeature* self, const Rows& rows, int64_t source, int64_t copy, Pooling pooling, bool silent,
             const Init& missing, int64_t column) {
            new (self) BoundPoolFeature{{&rows, source, pooling, silent, missing, nullptr, 0, copy}, column};
          },
          nb::arg("rows"), nb::arg("source"), nb::arg("copy"), nb::arg("pooling"), nb::arg("silent"),
          nb::arg("missing"), nb::arg("column"), nb::keep_alive<1, 2>());
  m.def("pool", &pool_columns, nb::arg("features"), nb::arg("bags"), nb::arg("out"), nb::arg("threads"), Released(),
        "Every feature into its columns of one output");
  m.def("pool_each", &pool_each, nb::arg("features"), nb::arg("bags"), nb::arg("outs"), nb::arg("threads"), Released(),
        "Every feature into an output of its own");

  nb::class_<UpdateTable>(m, "UpdateTable", "One table's part of a backward pass")
      .def(
          "__init__",
          [](UpdateTable* self, const Rows& rows, Optimizer optimizer, Reduce reduce, float lr,
             const std::vector<float>& settings, float weight_decay, float shrink, float clip_value, float clip_norm,
             float max_norm, float grad_scale, double score, uint64_t step, uint64_t rounding_stream) {
            auto* table = new (self) UpdateTable;
            table->rows = &rows;
            table->optimizer = optimizer;
            table->reduce = reduce;
            table->hyper.lr = lr;
            for (size_t i = 0; i < settings.size() && i < std::size(table->hyper.setting); ++i)
              table->hyper.setting[i] = settings[i];
            table->weight_decay = weight_decay;
            table->shrink = shrink;
            table->clip_value = clip_value;
            table->clip_norm = clip_norm;
            table->max_norm = max_norm;
            table->grad_scale = grad_scale;
            table->score = score;
            table->step = step;
            table->rounding_stream = rounding_stream;
          },
          nb::arg("rows"), nb::arg("optimizer"), nb::arg("reduce"), nb::arg("lr"), nb::arg("settings"),
          nb::arg("weight_decay"), nb::arg("shrink"), nb::arg("clip_value"), nb::arg("clip_norm"), nb::arg("max_norm"),
          nb::arg("grad_scale"), nb::arg("score"), nb::arg("step"), nb::arg("rounding_stream"), nb::keep_alive<1, 2>());
  nb::class_<BoundUpdateFeature>(m, "UpdateFeature", "The gradient of one feature's output")
      .def(
          "__init__",
          [](BoundUpdateFeature* self, int64_t table, int64_t source, int64_t copy, Pooling pooling, int64_t column) {
            new (self) BoundUpdateFeature{{table, source, pooling, nullptr, 0, copy}, column};
          },
          nb::arg("table"), nb::arg("source"), nb::arg("copy"), nb::arg("pooling"), nb::arg("column"));
  m.def("update", &update_rows, nb::arg("tables"), nb::arg("features"), nb::arg("grads"), nb::arg("bags"),
        nb::arg("threads"), Released(),
        "The optimizers' steps; returns, by table, (rows changed, gradients dropped for erased rows, rows whose sum "
        "overflowed)");
  m.def(
      "weight_gradients",
      [](const std::vector<const Rows*>& rows, const std::vector<BoundUpdateFeature>& bound,
         const std::vector<Gradient2d>& grads, const std::vector<Init>& missing, const BoundBags& bags,
         Vector<float> out, int threads) {
        weight_gradients(rows, with_gradients(bound, grads), missing, bags.bags, out.data(), threads);
      },
      nb::arg("rows"), nb::arg("features"), nb::arg("grads"), nb::arg("missing"), nb::arg("bags"), nb::arg("out"),
      nb::arg("threads"), Released());
  m.def(
      "all_finite",
      [](Gradient2d grad, int threads) {
        return all_finite(grad.data(), int64_t(grad.shape(0)), int64_t(grad.shape(1)), grad.stride(0), threads);
      },
      nb::arg("grad"), nb::arg("threads"), Released());

  m.def(
      "birth",
      [](const Rows& rows, const Init& init, Vector<const float> state, double score, Vector<const int64_t> keys,
         Vector<int32_t> slots, int threads) {
        birth(rows, init, state.data(), score, keys.data(), slots_of(slots), int64_t(keys.shape(0)), threads);
      },
      nb::arg("rows"), nb::arg("init"), nb::arg("state"), nb::arg("score"), nb::arg("keys"), nb::arg("slots"),
      nb::arg("threads"), Released());
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
      "read_state",
      [](const Rows& rows, Vector<int32_t> slots, int32_t from, Vector<const float> missing, Matrix<float> out) {
        read_state(rows, slots_of(slots), int64_t(slots.shape(0)), from, int32_t(out.shape(1)), missing.data(),
                   out.data());
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("from_float"), nb::arg("missing"), nb::arg("out"), Released());
  m.def(
      "write_state",
      [](const Rows& rows, Vector<int32_t> slots, int32_t from, Matrix<const float> values) {
        write_state(rows, slots_of(slots), int64_t(slots.shape(0)), from, int32_t(values.shape(1)), values.data());
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("from_float"), nb::arg("values"), Released());
  m.def(
      "read_scores",
      [](const Rows& rows, Vector<int32_t> slots, Vector<double> out) {
        read_scores(rows, slots_of(slots), int64_t(slots.shape(0)), out.data());
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("out"), Released());
  m.def(
      "write_scores",
      [](const Rows& rows, Vector<int32_t> slots, Vector<const double> values) {
        write_scores(rows, slots_of(slots), int64_t(slots.shape(0)), values.data());
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("values"), Released());
  m.def(
      "mark_erased",
      [](const Rows& rows, Vector<int32_t> slots) {
        set_flags(rows, slots_of(slots), int64_t(slots.shape(0)), kErased);
      },
      nb::arg("rows"), nb::arg("slots"), Released());
  m.def(
      "touch",
      [](const Rows& rows, Vector<int32_t> slots, int64_t begin, int64_t end, double score) {
        touch(rows, slots_of(slots) + begin, end - begin, score);
      },
      nb::arg("rows"), nb::arg("slots"), nb::arg("begin"), nb::arg("end"), nb::arg("score"), Released());
}

}  // namespace shoal
