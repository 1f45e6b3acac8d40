#include "base/xxh64.h"

#include <string_view>
#include <vector>

#include "base/check.h"

namespace shoal {
namespace {

uint64_t of(std::string_view text) { return xxh64(text.data(), text.size()); }

void published_values() {
  CHECK(of("") == 0xef46db3751d8e999ULL, of(""));
  CHECK(of("a") == 0xd24ec4f1a98c6e5bULL, of("a"));
  CHECK(of("as") == 0x1c330fb2d66be179ULL, of("as"));
  CHECK(of("asd") == 0x631c37ce72a97393ULL, of("asd"));
  CHECK(of("asdf") == 0x415872f599cea71eULL, of("asdf"));
  CHECK(of("abc") == 0x44bc2cf5ad770999ULL, of("abc"));
  std::string_view whale = "Call me Ishmael. Some years ago--never mind how long precisely-";
  CHECK(of(whale) == 0x02a2e85470d6fd96ULL, of(whale));
}

void values_of_xxhash_s_own_test() {
  std::vector<unsigned char> bytes(101);
  uint32_t state = 2654435761u;
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(state >> 24);
    state *= state;
  }
  CHECK(xxh64(bytes.data(), 1) == 0x4fce394cc88952d8ULL);
  CHECK(xxh64(bytes.data(), 14) == 0xcffa8db881bc3a3dULL);
  CHECK(xxh64(bytes.data(), 101) == 0x0eab543384f878adULL);
}

void any_address_and_only_its_own_bytes() {
  Random random(1);
  for (size_t length = 0; length < 140; ++length) {
    // Memory of exactly that size: a sanitizer sees a read past its end.
    std::vector<unsigned char> alone(length);
    for (unsigned char& byte : alone) byte = static_cast<unsigned char>(random.next());
    uint64_t wanted = xxh64(alone.data(), length);
    for (size_t shift = 0; shift < 9; ++shift) {
      std::vector<unsigned char> moved(shift + length + 1, 0xee);
      if (length) std::memcpy(moved.data() + shift, alone.data(), length);
      CHECK(xxh64(moved.data() + shift, length) == wanted, length, shift);
    }
    for (size_t at = 0; at < length; ++at) {
      alone[at] ^= 1;
      CHECK(xxh64(alone.data(), length) != wanted, length, at);
      alone[at] ^= 1;
    }
  }
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::published_values();
  shoal::values_of_xxhash_s_own_test();
  shoal::any_address_and_only_its_own_bytes();
}
