// Philox4x32-10 (Salmon et al., SC11), sixteen blocks side by side. A block's counter is (key low, key high, block,
// word 3); its four words serve four neighbouring elements of a row. Include from *_isa.cc files: everything is static.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "base/cpu.h"

namespace shoal::SHOAL_ISA {

static constexpr int kPhiloxBlocks = 16;
static constexpr int kPhiloxWords = 4 * kPhiloxBlocks;

// A vector of 64-bit lanes, each with one 32-bit word of a block in its low half and anything in its high half: the
// machine's 32 x 32-bit multiply reads only the low half, and gives both words of the product in one lane. store_pairs
// writes a lane of each in turn: done lane by lane, through memory, it takes as long as the rounds.
#if defined(__AVX512F__)
struct Lanes {
  static constexpr int count = 8;
  __m512i v;
  static SHOAL_INLINE Lanes of(uint64_t x) { return {_mm512_set1_epi64(static_cast<int64_t>(x))}; }
  static SHOAL_INLINE Lanes load(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
  static SHOAL_INLINE void store_pairs(Lanes a, Lanes b, uint32_t* p) {
    _mm512_storeu_si512(p, _mm512_permutex2var_epi64(a.v, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b.v));
    _mm512_storeu_si512(p + 16, _mm512_permutex2var_epi64(a.v, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b.v));
  }
  SHOAL_INLINE Lanes times(Lanes b) const { return {_mm512_mul_epu32(v, b.v)}; }
  SHOAL_INLINE Lanes high() const { return {_mm512_srli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes shifted() const { return {_mm512_slli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes operator^(Lanes b) const { return {_mm512_xor_si512(v, b.v)}; }
};
#elif defined(__AVX2__)
struct Lanes {
  static constexpr int count = 4;
  __m256i v;
  static SHOAL_INLINE Lanes of(uint64_t x) { return {_mm256_set1_epi64x(static_cast<int64_t>(x))}; }
  static SHOAL_INLINE Lanes load(const uint64_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  static SHOAL_INLINE void store_pairs(Lanes a, Lanes b, uint32_t* p) {
    const __m256i even = _mm256_unpacklo_epi64(a.v, b.v), odd = _mm256_unpackhi_epi64(a.v, b.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_permute2x128_si256(even, odd, 0x31));
  }
  SHOAL_INLINE Lanes times(Lanes b) const { return {_mm256_mul_epu32(v, b.v)}; }
  SHOAL_INLINE Lanes high() const { return {_mm256_srli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes shifted() const { return {_mm256_slli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes operator^(Lanes b) const { return {_mm256_xor_si256(v, b.v)}; }
};
#elif defined(__SSE2__)
struct Lanes {
  static constexpr int count = 2;
  __m128i v;
  static SHOAL_INLINE Lanes of(uint64_t x) { return {_mm_set1_epi64x(static_cast<int64_t>(x))}; }
  static SHOAL_INLINE Lanes load(const uint64_t* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
  static SHOAL_INLINE void store_pairs(Lanes a, Lanes b, uint32_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(a.v, b.v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 4), _mm_unpackhi_epi64(a.v, b.v));
  }
  SHOAL_INLINE Lanes times(Lanes b) const { return {_mm_mul_epu32(v, b.v)}; }
  SHOAL_INLINE Lanes high() const { return {_mm_srli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes shifted() const { return {_mm_slli_epi64(v, 32)}; }
  SHOAL_INLINE Lanes operator^(Lanes b) const { return {_mm_xor_si128(v, b.v)}; }
};
#else
struct Lanes {
  static constexpr int count = 1;
  uint64_t v;
  static SHOAL_INLINE Lanes of(uint64_t x) { return {x}; }
  static SHOAL_INLINE Lanes load(const uint64_t* p) { return {*p}; }
  static SHOAL_INLINE void store_pairs(Lanes a, Lanes b, uint32_t* p) {
    std::memcpy(p, &a.v, 8);
    std::memcpy(p + 2, &b.v, 8);
  }
  SHOAL_INLINE Lanes times(Lanes b) const { return {(v & 0xffffffffu) * (b.v & 0xffffffffu)}; }
  SHOAL_INLINE Lanes high() const { return {v >> 32}; }
  SHOAL_INLINE Lanes shifted() const { return {v << 32}; }
  SHOAL_INLINE Lanes operator^(Lanes b) const { return {v ^ b.v}; }
};
#endif

// words[4 * i + w] is word w of block first + i.
static inline void philox_blocks(uint64_t stream, uint64_t key, uint32_t first, uint32_t word3, uint32_t* words) {
  constexpr uint64_t kLow = 0xffffffffu;
  const Lanes m0 = Lanes::of(0xD2511F53u), m1 = Lanes::of(0xCD9E8D57u);
  for (int at = 0; at < kPhiloxBlocks; at += Lanes::count) {
    uint64_t numbers[Lanes::count];
    for (int i = 0; i < Lanes::count; ++i) numbers[i] = first + static_cast<uint32_t>(at + i);
    Lanes c0 = Lanes::of(key & kLow), c1 = Lanes::of(key >> 32), c2 = Lanes::load(numbers), c3 = Lanes::of(word3);
    uint32_t k0 = static_cast<uint32_t>(stream), k1 = static_cast<uint32_t>(stream >> 32);
    for (int round = 0; round < 10; ++round) {
      const Lanes p0 = c0.times(m0), p1 = c2.times(m1);
      c0 = p1.high() ^ c1 ^ Lanes::of(k0);
      c2 = p0.high() ^ c3 ^ Lanes::of(k1);
      c1 = p1;
      c3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    // Two words to a lane: the low half of the first, and the second shifted above it.
    Lanes::store_pairs(c0.shifted().high() ^ c1.shifted(), c2.shifted().high() ^ c3.shifted(), words + 4 * at);
  }
}

}  // namespace shoal::SHOAL_ISA
