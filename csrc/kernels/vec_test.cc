// Conversions between float and the 16-bit dtypes, as every instruction set does them, against a slow definition.
#define SHOAL_ISA test
#include "kernels/vec.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

struct Format {
  Dtype dtype;
  int exponent_bits, fraction_bits;

  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << fraction_bits; }
  bool is_nan(uint32_t bits) const { return (bits & 0x7fffu) > infinity(); }
  // The value of a pattern; of infinity, the power of two where it begins.
  double value(uint32_t bits) const {
    int exponent = static_cast<int>((bits & 0x7fffu) >> fraction_bits);
    double fraction = bits & ((1u << fraction_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double size = exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                                : std::ldexp(fraction + (1u << fraction_bits), exponent - bias - fraction_bits);
    return bits & 0x8000u ? -size : size;
  }
  // The pattern nearest to x, and of two the even one.
  uint16_t nearest(float x) const {
    uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
    double size = std::fabs(static_cast<double>(x));
    uint32_t low = 0, high = infinity();  // value(low) <= size, and beyond infinity nothing is nearer
    while (high - low > 1) {
      uint32_t middle = (low + high) / 2;
      (value(middle) <= size ? low : high) = middle;
    }
    double to_low = size - value(low), to_high = value(high) - size;
    bool up = to_high < to_low || (to_high == to_low && high % 2 == 0);
    return static_cast<uint16_t>(sign | (up ? high : low));
  }
};

constexpr Format kFormats[] = {{Dtype::f16, 5, 10}, {Dtype::bf16, 8, 7}};
constexpr int32_t kDim = 100;  // not a multiple of a register, so that remainders are converted too

struct Rows16 {
  DramStore store;
  std::vector<uint32_t> slots;
  std::vector<int64_t> keys;

  Rows16(Dtype dtype, size_t values) : store(kDim, dtype, 0), slots((values + kDim - 1) / kDim), keys(slots.size()) {
    int64_t n = static_cast<int64_t>(slots.size());
    CHECK(store.reserve(n).ok());
    store.take(slots.data(), n);
  }
  uint16_t& at(size_t i) { return reinterpret_cast<uint16_t*>(store.rows().weights(slots[i / kDim]))[i % kDim]; }
  std::vector<float> read() {
    std::vector<float> out(slots.size() * kDim);
    read_weights(store.rows(), {}, keys.data(), slots.data(), static_cast<int64_t>(slots.size()), out.data(), 1);
    return out;
  }
  void write(std::vector<float> in) {
    in.resize(slots.size() * kDim, 0.0f);
    write_weights(store.rows(), slots.data(), static_cast<int64_t>(slots.size()), in.data());
  }
};

void every_pattern_reads_as_its_value_and_goes_back() {
  for (const Format& format : kFormats)
    for (const std::string& isa : available_isas()) {
      CHECK(set_isa(isa), isa);
      Rows16 rows(format.dtype, 65536);
      for (uint32_t bits = 0; bits < 65536; ++bits) rows.at(bits) = static_cast<uint16_t>(bits);
      std::vector<float> values = rows.read();
      for (uint32_t bits = 0; bits < 65536; ++bits) {
        float x = values[bits];
        CHECK(std::signbit(x) == (bits >> 15 != 0), isa, bits, x);
        if (format.is_nan(bits))
          CHECK(std::isnan(x), isa, bits, x);
        else if ((bits & 0x7fffu) == format.infinity())
          CHECK(std::isinf(x), isa, bits, x);
        else
          CHECK(static_cast<double>(x) == format.value(bits), isa, bits, x, format.value(bits));
      }
      rows.write(values);
      for (uint32_t bits = 0; bits < 65536; ++bits)
        CHECK(rows.at(bits) == bits || (format.is_nan(bits) && format.is_nan(rows.at(bits))), isa, bits, rows.at(bits));
    }
}

void floats_round_to_the_nearest_and_ties_to_even() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Format& format : kFormats) {
    std::vector<float> in = {0.0f,
                             -0.0f,
                             kInfinity,
                             -kInfinity,
                             kNan,
                             -kNan,
                             std::numeric_limits<float>::max(),
                             -std::numeric_limits<float>::max(),
                             std::numeric_limits<float>::denorm_min(),
                             65504.0f,
                             65519.0f,
                             65519.996f,
                             65520.0f,
                             -65520.0f,
                             65536.0f,
                             0x1p-24f,
                             0x1p-25f,
                             0x1.000002p-25f,
                             0x1p-26f,
                             0x1.ffp127f,
                             0x1.fefffep127f};
    // Both sides of every boundary between two neighbours, and the boundary itself.
    for (uint32_t bits = 0; bits < format.infinity(); ++bits) {
      double middle = (format.value(bits) + format.value(bits + 1)) / 2;
      if (middle > static_cast<double>(std::numeric_limits<float>::max())) continue;
      float x = static_cast<float>(middle);
      CHECK(static_cast<double>(x) == middle, bits);
      for (float y : {x, std::nextafterf(x, 0.0f), std::nextafterf(x, kInfinity)}) {
        in.push_back(y);
        in.push_back(-y);
      }
    }
    Random random(1);
    for (int i = 0; i < 100000; ++i) in.push_back(test::float_of(static_cast<uint32_t>(random.next())));
    std::vector<uint16_t> wanted;
    for (float x : in) wanted.push_back(std::isnan(x) ? 0x7fffu : format.nearest(x));
    for (const std::string& isa : available_isas()) {
      CHECK(set_isa(isa), isa);
      Rows16 rows(format.dtype, in.size());
      rows.write(in);
      for (size_t i = 0; i < in.size(); ++i) {
        if (std::isnan(in[i]))
          CHECK(format.is_nan(rows.at(i)), isa, i, rows.at(i));
        else
          CHECK(rows.at(i) == wanted[i], isa, in[i], rows.at(i), wanted[i]);
      }
    }
  }
}

void a_dot_product_is_right_for_every_length() {
  Random random(2);
  std::vector<float> a, b;
  for (int i = 0; i < 300; ++i) {
    a.push_back(random.unit());
    b.push_back(random.unit());
  }
  for (int32_t n = 0; n <= 300; ++n) {
    double wanted = std::inner_product(a.begin(), a.begin() + n, b.begin(), 0.0, std::plus<double>(),
                                       [](double x, double y) { return x * y; });
    CHECK(std::fabs(test::dot(a.data(), b.data(), n) - wanted) < 1e-5, n, wanted);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::every_pattern_reads_as_its_value_and_goes_back();
  shoal::floats_round_to_the_nearest_and_ties_to_even();
  shoal::a_dot_product_is_right_for_every_length();
}
