#define SHOAL_ISA test
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "kernels/rounding_isa.h"

namespace shoal {
namespace {

using namespace test;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> some_floats() {
  std::vector<float> floats = {0.0f,     1.0f,     1.5f,     0x1.fffffep0f, 0.1f,
                               3.14159f, 65504.0f, 65500.3f, 0x1p-14f,      0x1.8p-130f};
  Random random(1);
  for (int i = 0; i < 40; ++i)
    floats.push_back(random.unit() * std::ldexp(1.0f, static_cast<int>(random.below(24)) - 12));
  return floats;
}

// The mean of all equally likely results is the number itself, and each is one of its two neighbours.
void bf16_is_unbiased() {
  for (float size : some_floats())
    for (float x : {size, -size}) {
      double sum = 0;
      for (uint32_t word = 0; word < 65536; ++word) {
        // Only the lowest sixteen bits are drawn from.
        float y = from_bf16(stochastic_bf16(x, word | word << 16));
        CHECK(std::fabs(y - x) <= std::ldexp(1.0f, std::max(std::ilogb(x), -126) - 7), x, y);
        sum += y;
      }
      CHECK(sum / 65536 == static_cast<double>(x), x, sum / 65536);
    }
}

void f16_is_unbiased() {
  for (float size : some_floats())
    for (float x : {size, -size}) {
      if (std::fabs(x) < 0x1p-14f) continue;
      double sum = 0;
      for (uint32_t word = 0; word < 8192; ++word) {
        float y = from_f16(stochastic_f16(x, word | word << 13));
        CHECK(std::fabs(y - x) <= std::ldexp(1.0f, std::ilogb(x) - 10), x, y);
        sum += y;
      }
      CHECK(sum / 8192 == static_cast<double>(x), x, sum / 8192);
    }
}

// Subnormal results draw from 24 bits; 65536 evenly spaced words see their mean to a part of 2^16 of a step.
void f16_is_unbiased_below_its_normal_range() {
  constexpr double kStep = 0x1p-24;
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    float x = random.unit() * std::ldexp(1.0f, -14 - static_cast<int>(random.below(14)));
    double sum = 0;
    for (uint32_t word = 0; word < 65536; ++word) {
      float y = from_f16(stochastic_f16(x, word << 16 | 0x8000u));
      CHECK(std::fabs(y - x) <= kStep, x, y);
      sum += y;
    }
    CHECK(std::fabs(sum / 65536 - static_cast<double>(x)) < kStep * 0x1p-14, x, sum / 65536);
  }
}

void exact_values_stay() {
  Random random(3);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    uint16_t h = static_cast<uint16_t>(bits);
    for (uint32_t word : {0u, ~0u, static_cast<uint32_t>(random.next())}) {
      float b = from_bf16(h), f = from_f16(h);
      if (!std::isnan(b)) CHECK(stochastic_bf16(b, word) == h, bits, word, stochastic_bf16(b, word));
      // The sum of a subnormal and its draw is a float: the highest draws round up to the next step.
      uint32_t drawn = std::fabs(f) < 0x1p-14f ? word >> 1 : word;
      if (!std::isnan(f)) CHECK(stochastic_f16(f, drawn) == h, bits, drawn, stochastic_f16(f, drawn));
      if (std::isnan(b)) CHECK(std::isnan(from_bf16(stochastic_bf16(b, word))), bits, word);
      if (std::isnan(f)) CHECK(std::isnan(from_f16(stochastic_f16(f, word))), bits, word);
    }
  }
}

void finite_stays_finite() {
  for (float x : {65504.0f, 65510.0f, 65519.9f, 65520.0f, 70000.0f, 1e30f})
    for (uint32_t word : {0u, 1u, 0x1fffu, ~0u}) {
      CHECK(from_f16(stochastic_f16(x, word)) == 65504.0f, x, word);
      CHECK(from_f16(stochastic_f16(-x, word)) == -65504.0f, x, word);
    }
  constexpr float kMost = std::numeric_limits<float>::max();
  for (uint32_t word : {0u, 1u, 0xffffu, ~0u}) {
    CHECK(from_bf16(stochastic_bf16(kMost, word)) == 0x1.fep127f, word);
    CHECK(from_bf16(stochastic_bf16(-kMost, word)) == -0x1.fep127f, word);
    CHECK(from_bf16(stochastic_bf16(kInfinity, word)) == kInfinity, word);
    CHECK(from_f16(stochastic_f16(-kInfinity, word)) == -kInfinity, word);
  }
}

void rows_draw_by_stream_key_step_and_element() {
  constexpr int32_t kDim = 150;
  std::vector<float> in;
  for (int32_t i = 0; i < kDim; ++i) in.push_back(1.0f + 0x1p-9f);  // half-way: each draw decides
  auto rounded = [&](Dtype dtype, uint64_t stream, int64_t key, uint64_t step, int32_t dim) {
    std::vector<uint16_t> out(static_cast<size_t>(dim));
    store_stochastic(dtype, reinterpret_cast<char*>(out.data()), dim, in.data(), stream, key, step);
    return out;
  };
  std::vector<uint16_t> base = rounded(Dtype::bf16, 1, 2, 3, kDim);
  CHECK(base == rounded(Dtype::bf16, 1, 2, 3, kDim));
  CHECK(base != rounded(Dtype::bf16, 2, 2, 3, kDim));
  CHECK(base != rounded(Dtype::bf16, 1, -2, 3, kDim));
  CHECK(base != rounded(Dtype::bf16, 1, 2, 4, kDim));
  CHECK(base != rounded(Dtype::bf16, 1, 2, 3 + (uint64_t{1} << 32), kDim));
  for (int32_t dim : {1, 3, 64, 65}) {
    std::vector<uint16_t> shorter = rounded(Dtype::bf16, 1, 2, 3, dim);
    CHECK(std::equal(shorter.begin(), shorter.end(), base.begin()), dim);
  }
  int ups = 0;
  for (uint16_t h : base) ups += from_bf16(h) > 1.0f;
  CHECK(ups > kDim / 4 && ups < 3 * kDim / 4, ups);
  uint32_t words[kPhiloxWords];
  philox_blocks(1 ^ mix64(0), 2, 16, 3, words);  // elements 64 to 127
  for (int i = 0; i < kPhiloxWords; ++i) {
    uint16_t wanted = stochastic_bf16(in[0], words[i]);
    CHECK(base[static_cast<size_t>(64 + i)] == wanted, i);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::bf16_is_unbiased();
  shoal::f16_is_unbiased();
  shoal::f16_is_unbiased_below_its_normal_range();
  shoal::exact_values_stay();
  shoal::finite_stays_finite();
  shoal::rows_draw_by_stream_key_step_and_element();
}
