// Philox4x32-10 (Salmon et al., SC11), sixteen blocks side by side. A block's counter is (key low, key high, block,
// word 3); its four words serve four neighbouring elements of a row. Include from *_isa.cc files: everything is static.
#pragma once

#include <cstdint>

namespace shoal::SHOAL_ISA {

static constexpr int kPhiloxBlocks = 16;
static constexpr int kPhiloxWords = 4 * kPhiloxBlocks;

// words[4 * i + w] is word w of block first + i.
static inline void philox_blocks(uint64_t stream, uint64_t key, uint32_t first, uint32_t word3, uint32_t* words) {
  uint32_t c0[kPhiloxBlocks], c1[kPhiloxBlocks], c2[kPhiloxBlocks], c3[kPhiloxBlocks];
  for (int i = 0; i < kPhiloxBlocks; ++i) {
    c0[i] = static_cast<uint32_t>(key);
    c1[i] = static_cast<uint32_t>(key >> 32);
    c2[i] = first + static_cast<uint32_t>(i);
    c3[i] = word3;
  }
  uint32_t k0 = static_cast<uint32_t>(stream), k1 = static_cast<uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kPhiloxBlocks; ++i) {
      uint64_t p0 = uint64_t{0xD2511F53u} * c0[i];
      uint64_t p1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<uint32_t>(p1);
      c3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kPhiloxBlocks; ++i) {
    words[4 * i + 0] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

}  // namespace shoal::SHOAL_ISA
