// Sixteen floats at a time, in a way every compiler turns into the widest registers it has. Include from *_isa.cc files
// only: everything is static, so that no instruction set's code can be linked into another's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "base/rows.h"

namespace shoal::SHOAL_ISA {

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));

typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x4 __attribute__((vector_size(16), aligned(4)));

static constexpr int kLanes = 16;

static inline f32x16 load16(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store16(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// ---- 16-bit floats

static inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

static inline uint16_t to_bf16(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_f16(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, body = h & 0x7fffu;
  if (body >= 0x7c00u) return float_of(sign | 0x7f800000u | (body & 0x3ffu) << 13);
  if (body >= 0x0400u) return float_of(sign | ((body << 13) + (112u << 23)));
  float tiny = static_cast<float>(body) * 0x1p-24f;
  return sign ? -tiny : tiny;
#endif
}

static inline uint16_t to_f16(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
  if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((body >> 13) & 0x3ffu));
  if (body >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (body >= 0x38800000u)
    return static_cast<uint16_t>(sign | ((body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13));
  // Adding 0.5 puts the subnormal's last place at the float's last place, and the addition rounds to nearest even.
  return static_cast<uint16_t>(sign | (bits_of(float_of(body) + 0.5f) - bits_of(0.5f)));
#endif
}

// ---- rows of any dtype, as floats

template <Dtype D>
struct Element;
template <>
struct Element<Dtype::f32> {
  using type = float;
  static float load(float x) { return x; }
  static float nearest(float x) { return x; }
};
template <>
struct Element<Dtype::f16> {
  using type = uint16_t;
  static float load(uint16_t x) { return from_f16(x); }
  static uint16_t nearest(float x) { return to_f16(x); }
};
template <>
struct Element<Dtype::bf16> {
  using type = uint16_t;
  static float load(uint16_t x) { return from_bf16(x); }
  static uint16_t nearest(float x) { return to_bf16(x); }
};

template <Dtype D>
static inline f32x16 load_elements(const typename Element<D>::type* p) {
  if constexpr (D == Dtype::f32) {
    return load16(p);
  } else {
    f32x16 v;
    for (int i = 0; i < kLanes; ++i) v[i] = Element<D>::load(p[i]);
    return v;
  }
}
#if defined(__F16C__)
template <>
inline __attribute__((always_inline)) f32x16 load_elements<Dtype::f16>(const uint16_t* p) {
  f32x16 v;
  for (int half = 0; half < 2; ++half) {
    __m256 part = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * half)));
    std::memcpy(reinterpret_cast<char*>(&v) + 32 * half, &part, sizeof part);
  }
  return v;
}
#endif

template <Dtype D>
static inline void load_row(const char* row, int32_t dim, float* out) {
  const auto* p = reinterpret_cast<const typename Element<D>::type*>(row);
  for (int32_t i = 0; i < dim; ++i) out[i] = Element<D>::load(p[i]);
}

template <Dtype D>
static inline void store_nearest(char* row, int32_t dim, const float* in) {
  auto* p = reinterpret_cast<typename Element<D>::type*>(row);
  for (int32_t i = 0; i < dim; ++i) p[i] = Element<D>::nearest(in[i]);
}

static inline void store_nearest(Dtype dtype, char* row, int32_t dim, const float* in) {
  switch (dtype) {
    case Dtype::f32: return store_nearest<Dtype::f32>(row, dim, in);
    case Dtype::f16: return store_nearest<Dtype::f16>(row, dim, in);
    case Dtype::bf16: return store_nearest<Dtype::bf16>(row, dim, in);
  }
}

static inline void load_row(Dtype dtype, const char* row, int32_t dim, float* out) {
  switch (dtype) {
    case Dtype::f32: return load_row<Dtype::f32>(row, dim, out);
    case Dtype::f16: return load_row<Dtype::f16>(row, dim, out);
    case Dtype::bf16: return load_row<Dtype::bf16>(row, dim, out);
  }
}

// ---- reductions over a row. Sixteen partial sums whatever the registers' width, folded in halves: the same bits on
// every instruction set.

SHOAL_INLINE static float fold(f32x16 v) {
  f32x8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  f32x4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

SHOAL_INLINE static float dot(const float* a, const float* b, int32_t n) {
  f32x16 sum = {};
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum += load16(a + i) * load16(b + i);
  if (i < n) {
    float last[kLanes] = {};
    for (int lane = 0; lane < kLanes && i < n; ++i, ++lane) last[lane] = a[i] * b[i];
    sum += load16(last);
  }
  return fold(sum);
}

SHOAL_INLINE static float sum_squares(const float* a, int32_t n) { return dot(a, a, n); }

}  // namespace shoal::SHOAL_ISA
