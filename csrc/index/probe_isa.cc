#include "index/probe.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/rows.h"

namespace shoal {
namespace {

// One bit for each used key of the bucket that equals `key`.
inline uint32_t match(const Bucket& bucket, int64_t key) {
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

// Beyond the home bucket, which is full and passed keys on.
__attribute__((noinline)) uint32_t find_beyond(const IndexView& view, int64_t key) {
  for (uint64_t at = home_of(view, index_hash(key)) + 1;; ++at) {
    const Bucket& bucket = *view.at(at);
    if (uint32_t hit = match(bucket, key)) return bucket.slots[__builtin_ctz(hit)];
    if (bucket.over == 0) return kNoSlot;
  }
}

inline uint32_t find_from(const IndexView& view, int64_t key, const Bucket& home) {
  if (uint32_t hit = match(home, key)) return home.slots[__builtin_ctz(hit)];
  return home.over == 0 ? kNoSlot : find_beyond(view, key);
}

// While one block's lines travel from memory, the block before it is compared.
constexpr size_t kBlock = 32;

template <typename Key>
size_t find(const IndexView& view, const Key* keys, size_t n, uint32_t* slots) {
  const Bucket* homes[2][kBlock];
  auto start = [&](size_t block) {
    size_t begin = block * kBlock, count = n - begin < kBlock ? n - begin : kBlock;
    const Bucket** home = homes[block & 1];
    for (size_t i = 0; i < count; ++i) home[i] = view.at(home_of(view, index_hash(keys[begin + i])));
    for (size_t i = 0; i < count; ++i) prefetch_far(home[i]);
  };
  size_t blocks = (n + kBlock - 1) / kBlock, missing = 0;
  if (blocks) start(0);
  for (size_t block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) start(block + 1);
    size_t begin = block * kBlock, count = n - begin < kBlock ? n - begin : kBlock;
    for (size_t i = 0; i < count; ++i) {
      uint32_t slot = find_from(view, keys[begin + i], *homes[block & 1][i]);
      slots[begin + i] = slot;
      missing += slot == kNoSlot;
    }
  }
  return missing;
}

}  // namespace

extern const Probe SHOAL_ISA_TABLE(probe);
const Probe SHOAL_ISA_TABLE(probe) = {find<int64_t>, find<int32_t>};

}  // namespace shoal
