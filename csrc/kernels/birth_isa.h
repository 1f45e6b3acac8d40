// Births for *_isa.cc files.
#pragma once

#include "base/normal_table.h"
#include "base/philox.h"
#include "kernels/birth.h"

namespace shoal::SHOAL_ISA {

// By way of a signed number, for which every instruction set has a conversion.
static inline float unit_uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

static inline float unit_normal(uint32_t word) {
  uint32_t tail = word & 0x7fffffffu;
  // tail >> octave is in [64, 128), or the tail itself where it is below, which is a knot. No branches: the sign's would
  // go wrong every other time.
  int octave = 25 - __builtin_clz(tail | 64);
  uint32_t knot = 64u * static_cast<uint32_t>(octave) + (tail >> octave);
  uint32_t rest = tail & ((1u << octave) - 1);
  float along = static_cast<float>(static_cast<int32_t>(rest)) * float_of((127u - static_cast<uint32_t>(octave)) << 23);
  float z = kNormalTable[knot] + along * (kNormalTable[knot + 1] - kNormalTable[knot]);
  return float_of(bits_of(z) ^ (word & 0x80000000u));
}

static inline void born(const Init& init, int64_t key, int32_t dim, float* out) {
  if (init.kind == InitKind::zeros || init.kind == InitKind::constant) {
    float value = init.kind == InitKind::zeros ? 0.0f : init.a;
    for (int32_t i = 0; i < dim; ++i) out[i] = value;
    return;
  }
  uint32_t words[kPhiloxWords];
  for (int32_t at = 0; at < dim; at += kPhiloxWords) {
    philox_blocks(init.stream, static_cast<uint64_t>(key), static_cast<uint32_t>(at / 4), 0, words);
    int32_t count = dim - at < kPhiloxWords ? dim - at : kPhiloxWords;
    const float a = init.a, b = init.b;
    if (init.kind == InitKind::uniform)
      for (int32_t i = 0; i < count; ++i) out[at + i] = a + unit_uniform(words[i]) * b;
    else
      for (int32_t i = 0; i < count; ++i) out[at + i] = a + unit_normal(words[i]) * b;
  }
}

}  // namespace shoal::SHOAL_ISA
