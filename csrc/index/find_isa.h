// Finds the slots of many keys, a block at a time. Include from *_isa.cc files only.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "base/rows.h"
#include "index/bucket.h"

namespace shoal::SHOAL_ISA {

// One bit for each used key of the bucket that equals `key`.
SHOAL_INLINE static uint32_t match(const Bucket& bucket, int64_t key) {
#if defined(__AVX512F__)
  uint32_t equal = _mm512_cmpeq_epi64_mask(_mm512_load_si512(&bucket), _mm512_set1_epi64(key));
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi64x(key);
  const auto* line = reinterpret_cast<const __m256i*>(&bucket);
  __m256i first = _mm256_cmpeq_epi64(_mm256_load_si256(line), wanted);
  uint32_t equal = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(first))) |
                   static_cast<uint32_t>(bucket.keys[4] == key) << 4;
#else
  uint32_t equal = 0;
  for (int i = 0; i < kBucketKeys; ++i) equal |= static_cast<uint32_t>(bucket.keys[i] == key) << i;
#endif
  return equal & bucket.used;
}

// Searches after the home bucket, which is full and passed keys on.
__attribute__((noinline)) static uint32_t find_beyond(const IndexView& view, int64_t key) {
  for (uint64_t at = home_of(view, index_hash(key)) + 1;; ++at) {
    const Bucket& bucket = *view.at(at);
    if (uint32_t hit = match(bucket, key)) return bucket.slots[__builtin_ctz(hit)];
    if (bucket.over == 0) return kNoSlot;
  }
}

#if defined(__AVX512DQ__)
SHOAL_INLINE static __m512i load_keys(const int64_t* keys) { return _mm512_loadu_si512(keys); }
SHOAL_INLINE static __m512i load_keys(const int32_t* keys) {
  return _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys)));
}

// The home buckets of eight keys: what home_of() and at() say of each, in eight lanes.
template <typename Key>
SHOAL_INLINE static void eight_homes(const IndexView& view, const Key* keys, const Bucket** homes) {
  __m512i x = load_keys(keys);
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(0xff51afd7ed558ccdULL)));
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(0xc4ceb9fe1a85ec53ULL)));
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
  x = _mm512_andnot_si512(_mm512_set1_epi64(1), x);
  const __mmask8 is_low = _mm512_cmplt_epu64_mask(x, _mm512_set1_epi64(static_cast<int64_t>(view.frontier)));
  const __m512i buckets = _mm512_mask_blend_epi64(is_low, _mm512_set1_epi64(static_cast<int64_t>(view.high)),
                                                  _mm512_set1_epi64(static_cast<int64_t>(view.low)));
  // The upper half of the product, by halves of the hash: there are fewer than 2^32 buckets.
  const __m512i upper = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), buckets);
  const __m512i lower = _mm512_srli_epi64(_mm512_mul_epu32(x, buckets), 32);
  const __m512i bucket = _mm512_srli_epi64(_mm512_add_epi64(upper, lower), 32);
  if (view.low <= kChunkBuckets && view.high <= kChunkBuckets) {
    const __m512i chunk = _mm512_set1_epi64(reinterpret_cast<int64_t>(view.chunks[0]));
    _mm512_storeu_si512(homes, _mm512_add_epi64(chunk, _mm512_slli_epi64(bucket, 6)));
    return;
  }
  uint64_t at[8];
  _mm512_storeu_si512(at, bucket);
  for (int i = 0; i < 8; ++i) homes[i] = view.at(at[i]);
}
#endif

// While one block's lines travel from memory, the block before it is compared.
static constexpr size_t kFindBlock = 32;

template <typename Key>
class Finder {
 public:
  Finder(const IndexView& view, const Key* keys, size_t n, uint32_t* slots)
      : view_(view), keys_(keys), n_(n), slots_(slots) {
    start(0);
  }

  size_t found() const { return found_; }
  size_t missing() const { return missing_; }
  // Writes the slots of the next block. REQUIRES: found() < n.
  SHOAL_INLINE void advance() {
    const size_t begin = found_, end = n_ - begin < kFindBlock ? n_ : begin + kFindBlock;
    if (end < n_) start(end);
    const Bucket* const* homes = homes_[begin / kFindBlock & 1];
    for (size_t i = begin; i < end; ++i) {
      const Bucket& home = *homes[i - begin];
      const int64_t key = keys_[i];
      if (uint32_t hit = match(home, key)) {
        slots_[i] = home.slots[__builtin_ctz(hit)];
        continue;
      }
      const uint32_t slot = home.over == 0 ? kNoSlot : find_beyond(view_, key);
      slots_[i] = slot;
      missing_ += slot == kNoSlot;
    }
    found_ = end;
  }

 private:
  // Prefetches the home buckets of a block.
  SHOAL_INLINE void start(size_t begin) {
    const size_t count = n_ - begin < kFindBlock ? n_ - begin : kFindBlock;
    const Bucket** homes = homes_[begin / kFindBlock & 1];
    const Key* keys = keys_ + begin;
    size_t i = 0;
#if defined(__AVX512DQ__)
    for (; i + 8 <= count; i += 8) eight_homes(view_, keys + i, homes + i);
#endif
    for (; i < count; ++i) homes[i] = view_.at(home_of(view_, index_hash(keys[i])));
    for (i = 0; i < count; ++i) prefetch_far(homes[i]);
  }

  const IndexView view_;
  const Key* keys_;
  const size_t n_;
  uint32_t* slots_;
  size_t found_ = 0, missing_ = 0;
  const Bucket* homes_[2][kFindBlock];
};

}  // namespace shoal::SHOAL_ISA
