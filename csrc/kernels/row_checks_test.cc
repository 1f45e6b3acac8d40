#include "kernels/row_checks.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/hash.h"

namespace shoal {
namespace {

using Keys = std::vector<int64_t>;

std::optional<int64_t> repeated(const Keys& keys, size_t pieces) {
  std::vector<std::span<const int64_t>> spans;
  for (size_t i = 0; i < pieces; ++i) {
    const size_t begin = keys.size() * i / pieces, end = keys.size() * (i + 1) / pieces;
    spans.emplace_back(keys.data() + begin, end - begin);
  }
  return repeated_key(spans);
}

void a_key_that_comes_twice_is_found_wherever_it_is() {
  std::mt19937_64 random(1);
  for (size_t n : {2, 3, 100, 5000, 200'000})
    for (size_t pieces : {1, 2, 7}) {
      Keys keys(n);
      for (size_t i = 0; i < n; ++i) keys[i] = static_cast<int64_t>(i * i) - 5000;
      CHECK(!repeated(keys, pieces), n, pieces);
      std::shuffle(keys.begin(), keys.end(), random);
      CHECK(!repeated(keys, pieces), n, pieces);
      for (int round = 0; round < 5; ++round) {
        Keys changed = keys;
        const size_t from = random() % n, to = (from + 1 + random() % (n - 1)) % n;
        changed[to] = changed[from];
        CHECK(repeated(changed, pieces) == changed[from], n, pieces, from, to);
      }
    }
}

void keys_in_ascending_order_that_repeat_are_found() {
  CHECK(!repeated({}, 1));
  CHECK(!repeated({7}, 3));
  CHECK(repeated({1, 2, 2}, 1) == 2);
  CHECK(repeated({1, 2, 2}, 3) == 2);
}

void any_number_is_a_key() {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  const Keys keys = {kMost, 0, kLeast, -1, 1};
  CHECK(!repeated(keys, 2));
  for (int64_t key : keys) {
    Keys changed = keys;
    changed.push_back(key);
    CHECK(repeated(changed, 1) == key, key);
  }
}

void keys_in_the_order_of_buckets_are_looked_at() {
  for (uint64_t buckets : {1ull, 2ull, 1000ull, 4096ull, (1ull << 31) - 1}) {
    Keys keys(30'000);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i * 31) - 300;
    const auto bucket = [&](int64_t key) { return bucket_of(key, buckets); };
    std::sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) { return bucket(a) < bucket(b); });
    const uint64_t first = bucket(keys.front()), last = bucket(keys.back());
    const auto in = [&](uint64_t wanted) {
      return std::count_if(keys.begin(), keys.end(), [&](int64_t key) { return bucket(key) == wanted; });
    };
    const BucketedKeys found = look_by_bucket(keys, buckets, first, last);
    CHECK(found.misplaced == -1 && !found.repeated, buckets);
    CHECK(found.head == in(first) && found.tail == int64_t(keys.size()) - in(last), buckets);
    for (size_t at : {size_t{0}, size_t{100}, keys.size() - 2}) {
      Keys changed = keys;
      changed.insert(changed.begin() + int64_t(at), keys[at]);
      CHECK(look_by_bucket(changed, buckets, first, last).repeated == keys[at], buckets, at);
    }
    if (first == last) continue;
    CHECK(look_by_bucket(keys, buckets, first + 1, last).misplaced == 0, buckets);
    CHECK(look_by_bucket(keys, buckets, first, last - 1).misplaced == found.tail, buckets);
    std::swap(keys.front(), keys.back());
    CHECK(look_by_bucket(keys, buckets, first, last).misplaced > 0, buckets);
  }
  CHECK(look_by_bucket({}, 7, 0, 6).misplaced == -1);
}

void floats_that_are_not_finite_are_found() {
  for (uint16_t exponent : {uint16_t{0x7c00}, uint16_t{0x7f80}}) {
    std::vector<uint16_t> floats(100);
    for (size_t i = 0; i < floats.size(); ++i) floats[i] = static_cast<uint16_t>((exponent - 1 - i) | i << 15);
    CHECK(all_finite16(floats, exponent), exponent);
    for (uint16_t bad : {exponent, uint16_t(exponent | 0x8000), uint16_t(exponent | 1), uint16_t{0xffff}})
      for (size_t at : {size_t{0}, size_t{50}, size_t{99}}) {
        auto changed = floats;
        changed[at] = bad;
        CHECK(!all_finite16(changed, exponent), exponent, bad, at);
      }
  }
  CHECK(all_finite16({}, 0x7c00));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::a_key_that_comes_twice_is_found_wherever_it_is();
  shoal::keys_in_ascending_order_that_repeat_are_found();
  shoal::any_number_is_a_key();
  shoal::keys_in_the_order_of_buckets_are_looked_at();
  shoal::floats_that_are_not_finite_are_found();
}
