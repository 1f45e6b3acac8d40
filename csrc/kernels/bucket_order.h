// The order in which rows leave the process: by the bucket of their key. So some buckets are read as one piece.
#pragma once

#include <cstdint>

namespace shoal {

// order[i] = the position of the key that comes i-th; keys of one bucket keep their order. Throws std::bad_alloc.
// REQUIRES: n < 2^32, 0 < buckets < 2^32.
void order_by_bucket(const int64_t* keys, int64_t n, uint64_t buckets, int64_t* order);

}  // namespace shoal
