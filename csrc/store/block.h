// How rows lie in the files of a store on disk: in blocks. A block can be checked: that it is whole, and that it is the
// one that was wanted.
//
//   block = checksum of what follows (4 B), rows in it (4 B), its segment (8 B), its number there (8 B),
//           then for each row its key (8 B) and its bytes
//
// A block is read and written as a whole. It is 4 KiB, or as many times that as one row needs.
#pragma once

#include <cstdint>

#include "base/file.h"
#include "base/status.h"

namespace shoal {

struct BlockLayout {
  int64_t row_bytes = 0;
  int64_t block_bytes = 0;
  int64_t rows_per_block = 0;

  static constexpr int64_t kHeaderBytes = 24;
  static constexpr int64_t kKeyBytes = 8;

  static BlockLayout of(int64_t row_bytes);

  int64_t record_bytes() const { return kKeyBytes + row_bytes; }
  const char* record(const char* block, int64_t row) const { return block + kHeaderBytes + row * record_bytes(); }
  int64_t key(const char* block, int64_t row) const;
  const char* row(const char* block, int64_t row) const { return record(block, row) + kKeyBytes; }

  // Puts a row into a block that is being filled; then, once it has `rows` rows, writes the header.
  void put(char* block, int64_t row, int64_t key, const char* bytes) const;
  void seal(char* block, uint32_t rows, uint64_t segment, uint64_t number) const;
  // Returns the number of rows of a block that is whole and the wanted one; -1 for any other.
  int64_t rows_of(const char* block, uint64_t segment, uint64_t number) const;
};

}  // namespace shoal
