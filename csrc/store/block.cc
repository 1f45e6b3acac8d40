#include "store/block.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace shoal {

namespace {

struct Header {
  uint32_t crc;
  uint32_t rows;
  uint64_t segment;
  uint64_t number;
};
static_assert(sizeof(Header) == BlockLayout::kHeaderBytes);

// Returns the CRC of the header without its own CRC, and of all that follows it.
uint32_t crc_of(const char* block, int64_t bytes) {
  static_assert(kBlockBytes % 32 == 0);
  constexpr size_t kApart = 32;
  const uint32_t rest = crc32c_of_quarters(block + kApart, size_t(bytes) - kApart);
  return crc32c(block + sizeof(uint32_t), kApart - sizeof(uint32_t), rest);
}

}  // namespace

BlockLayout BlockLayout::of(int64_t row_bytes) {
  const int64_t least = kHeaderBytes + kKeyBytes + row_bytes;
  const int64_t block_bytes = (least + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  return {row_bytes, block_bytes, (block_bytes - kHeaderBytes) / (kKeyBytes + row_bytes)};
}

int64_t BlockLayout::key(const char* block, int64_t row) const {
  int64_t key;
  std::memcpy(&key, record(block, row), sizeof key);
  return key;
}

void BlockLayout::put(char* block, int64_t row, int64_t key, const char* bytes) const {
  char* const at = block + kHeaderBytes + row * record_bytes();
  std::memcpy(at, &key, sizeof key);
  std::memcpy(at + kKeyBytes, bytes, size_t(row_bytes));
}

void BlockLayout::seal(char* block, uint32_t rows, uint64_t segment, uint64_t number) const {
  const int64_t used = kHeaderBytes + rows * record_bytes();
  std::memset(block + used, 0, size_t(block_bytes - used));
  Header header{0, rows, segment, number};
  std::memcpy(block, &header, sizeof header);
  header.crc = crc_of(block, block_bytes);
  std::memcpy(block, &header.crc, sizeof header.crc);
}

int64_t BlockLayout::rows_of(const char* block, uint64_t segment, uint64_t number) const {
  Header header;
  std::memcpy(&header, block, sizeof header);
  if (header.segment != segment || header.number != number || header.rows > rows_per_block) return -1;
  return header.crc == crc_of(block, block_bytes) ? int64_t{header.rows} : -1;
}

}  // namespace shoal
