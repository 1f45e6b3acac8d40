// Ids of strings: XXH64 of their bytes, as columns of others hold them.
#pragma once

#include <cstdint>

namespace shoal {

// What the functions return where no string is wrong.
inline constexpr int64_t kNoneWrong = -1;

// out[i] = the hash of data[offsets[i], offsets[i + 1]). Returns the first i whose offsets do not lie within `bytes` of
// data in ascending order, or kNoneWrong. REQUIRES: n + 1 offsets, at any alignment that an Offset has.
template <typename Offset>
int64_t hash_strings(const char* data, int64_t bytes, const Offset* offsets, int64_t n, int64_t* out, int threads);

// out[i] = the hash of the `width` bytes at data + i * width, without the NULs at their end.
void hash_padded(const char* data, int64_t width, int64_t n, int64_t* out, int threads);

// out[i] = the hash of the UTF-8 of the `width` code points at data + i * width, without the NULs at their end. Returns the
// first i that has no UTF-8 (surrogates, numbers above 0x10ffff), or kNoneWrong. Throws std::bad_alloc.
int64_t hash_utf32(const uint32_t* data, int64_t width, int64_t n, int64_t* out, int threads);

}  // namespace shoal
