#define SHOAL_ISA test
#include "base/philox.h"

#include "base/check.h"

namespace shoal {
namespace {

using test::kPhiloxBlocks;
using test::kPhiloxWords;
using test::philox_blocks;

struct Vector {
  uint32_t counter[4], key[2], words[4];
};

// Known answers, published with Random123 for philox4x32 of ten rounds.
constexpr Vector kVectors[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

uint64_t join(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

void gives_the_known_answers_in_every_block() {
  for (const Vector& v : kVectors)
    for (uint32_t block = 0; block < kPhiloxBlocks; ++block) {
      uint32_t words[kPhiloxWords];
      philox_blocks(join(v.key[0], v.key[1]), join(v.counter[0], v.counter[1]), v.counter[2] - block, v.counter[3],
                    words);
      for (uint32_t w = 0; w < 4; ++w)
        CHECK(words[4 * block + w] == v.words[w], block, w, words[4 * block + w], v.words[w]);
    }
}

void blocks_do_not_depend_on_where_they_stand() {
  uint32_t a[kPhiloxWords], b[kPhiloxWords];
  philox_blocks(7, 11, 0, 3, a);
  philox_blocks(7, 11, 5, 3, b);
  for (int i = 20; i < kPhiloxWords; ++i) CHECK(a[i] == b[i - 20], i, a[i], b[i - 20]);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::gives_the_known_answers_in_every_block();
  shoal::blocks_do_not_depend_on_where_they_stand();
}
