#include "base/hash.h"

#include "base/check.h"

namespace shoal {
namespace {

void mix64_is_the_finaliser_of_murmurhash3() {
  CHECK(mix64(0) == 0);
  CHECK(mix64(1) == 0xb456bcfc34c2cb2cULL, mix64(1));
}

void mix64_is_a_bijection() {
  Random random(1);
  for (int i = 0; i < 100000; ++i) {
    uint64_t x = random.next();
    CHECK(unmix64(mix64(x)) == x, x);
    CHECK(mix64(unmix64(x)) == x, x);
  }
  CHECK(unmix64(mix64(~uint64_t{0})) == ~uint64_t{0});
}

void name_hash_is_fnv1a() {
  CHECK(name_hash("") == 0xcbf29ce484222325ULL);
  CHECK(name_hash("a") == 0xaf63dc4c8601ec8cULL, name_hash("a"));
  CHECK(name_hash("foobar") == 0x85944171f73967e8ULL, name_hash("foobar"));
  CHECK(name_hash("\xc3\xa9") != name_hash("e"));  // bytes above 127 count as they are
}

void streams_differ() {
  uint64_t name = name_hash("item"), other = name_hash("user");
  CHECK(birth_stream(0, name) != birth_stream(1, name));
  CHECK(birth_stream(0, name) != birth_stream(0, other));
  CHECK(birth_stream(0, name) != rounding_stream(0, name));
}

void buckets_are_even() {
  int64_t count[7] = {};
  for (int64_t key = -35000; key < 35000; ++key) ++count[bucket_of(key, 7)];
  for (int64_t n : count) CHECK(n > 9500 && n < 10500, n);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::mix64_is_the_finaliser_of_murmurhash3();
  shoal::mix64_is_a_bijection();
  shoal::name_hash_is_fnv1a();
  shoal::streams_differ();
  shoal::buckets_are_even();
}
