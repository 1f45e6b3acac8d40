// Stochastic rounding of a float row to 16 bits, for *_isa.cc files. The draw belongs to (seed, table, key, step, element);
// docs/formats.md specifies it.
#pragma once

#include "base/hash.h"
#include "base/philox.h"
#include "kernels/vec.h"

namespace shoal::SHOAL_ISA {

static inline uint16_t stochastic_bf16(float x, uint32_t word) {
  uint32_t bits = bits_of(x), truncated = bits & 0xffff0000u;
  uint32_t raised = (bits + (word & 0xffffu)) & 0xffff0000u;
  // Not past the largest finite value; what is not finite stays as it is.
  bool stop = (raised & 0x7f800000u) == 0x7f800000u;
  return static_cast<uint16_t>((stop ? truncated : raised) >> 16);
}

static inline uint16_t stochastic_f16(float x, uint32_t word) {
  uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
  if (body >= 0x7f800000u) return to_f16(x);
  if (body < 0x38800000u) {
    const float scaled = float_of(body) * 0x1p24f;
    const uint32_t whole = static_cast<uint32_t>(scaled);
    const bool up = static_cast<float>(word >> 8) * 0x1p-24f < scaled - static_cast<float>(whole);
    return static_cast<uint16_t>(sign | (whole + up));
  }
  uint32_t raised = (body + (word & 0x1fffu)) >> 13;
  uint32_t largest = (0x477fe000u) >> 13;
  if (raised > largest) raised = largest;
  return static_cast<uint16_t>(sign | (raised - (112u << 10)));
}

static inline void store_stochastic(Dtype dtype, char* row, int32_t dim, const float* in, uint64_t stream, int64_t key,
                                    uint64_t step) {
  uint32_t words[kPhiloxWords];
  auto* out = reinterpret_cast<uint16_t*>(row);
  stream ^= mix64(step >> 32);
  for (int32_t at = 0; at < dim; at += kPhiloxWords) {
    philox_blocks(stream, static_cast<uint64_t>(key), static_cast<uint32_t>(at / 4), static_cast<uint32_t>(step),
                  words);
    int32_t count = dim - at < kPhiloxWords ? dim - at : kPhiloxWords;
    if (dtype == Dtype::bf16)
      for (int32_t i = 0; i < count; ++i) out[at + i] = stochastic_bf16(in[at + i], words[i]);
    else
      for (int32_t i = 0; i < count; ++i) out[at + i] = stochastic_f16(in[at + i], words[i]);
  }
}

}  // namespace shoal::SHOAL_ISA
