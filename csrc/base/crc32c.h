// CRC-32C (Castagnoli): what tells a block that was written from one that was not, or not whole.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// Of `bytes` at `data`, going on from the CRC of what came before.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

// Of the CRCs of the data's four quarters, which a processor works on side by side: three times as fast.
// REQUIRES: bytes is a multiple of 32.
uint32_t crc32c_of_quarters(const void* data, size_t bytes);

// crc32c without the processor's instruction, for machines that have none.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace shoal
