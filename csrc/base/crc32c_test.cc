#include "base/crc32c.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

// From RFC 3720, B.4, and the check value of the polynomial.
void known_answers() {
  CHECK(crc32c("123456789", 9) == 0xe3069283u);
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xff);
  std::vector<unsigned char> up(32), down(32);
  for (int i = 0; i < 32; ++i) {
    up[i] = static_cast<unsigned char>(i);
    down[i] = static_cast<unsigned char>(31 - i);
  }
  CHECK(crc32c(zeros.data(), 32) == 0x8a9136aau);
  CHECK(crc32c(ones.data(), 32) == 0x62a8ab43u);
  CHECK(crc32c(up.data(), 32) == 0x46dd794eu);
  CHECK(crc32c(down.data(), 32) == 0x113fdb5cu);
  CHECK(crc32c(nullptr, 0) == 0);
}

void both_ways_agree_at_every_length_and_can_go_on() {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 37 + i / 7);
  for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
    const uint32_t whole = crc32c(text.data(), bytes);
    CHECK(whole == crc32c_portable(text.data(), bytes), bytes);
    const size_t first = bytes / 3;
    CHECK(whole == crc32c(text.data() + first, bytes - first, crc32c(text.data(), first)), bytes);
  }
}

void quarters_are_side_by_side() {
  std::string text(4096, 0);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 131 + i / 9);
  for (const size_t bytes : {32, 64, 1024, 4096}) {
    uint32_t crcs[4];
    for (size_t lane = 0; lane < 4; ++lane) crcs[lane] = crc32c_portable(text.data() + lane * bytes / 4, bytes / 4);
    CHECK(crc32c_of_quarters(text.data(), bytes) == crc32c_portable(crcs, sizeof crcs), bytes);
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::known_answers();
  shoal::quarters_are_side_by_side();
  shoal::both_ways_agree_at_every_length_and_can_go_on();
}
