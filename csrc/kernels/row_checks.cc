#include "kernels/row_checks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <random>
#include <vector>

#include "base/hash.h"
#include "base/memory.h"

namespace shoal {

namespace {

// Hashes are sorted into parts, in two passes where there are many, so that the set of a part stays in the second-level
// cache. A pass into more parts than that takes longer than two.
constexpr int64_t kHashesOfPart = 1 << 12;
constexpr int kMostPartBits = 6;

uint64_t process_seed() {
  static const uint64_t seed = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return seed;
}

// A bijection: two keys are the same if their hashes are.
uint64_t hash_of(int64_t key, uint64_t seed) { return mix64(static_cast<uint64_t>(key) ^ seed); }

bool ascend(std::span<const std::span<const int64_t>> pieces) {
  const int64_t* before = nullptr;
  for (const auto& piece : pieces)
    for (const int64_t& key : piece) {
      if (before && *before >= key) return false;
      before = &key;
    }
  return true;
}

// A hash that is there twice; 0 where none is. `used`: the highest bits of the hashes, which all have in common. None of
// them is 0.
uint64_t repeated_in_part(std::span<const uint64_t> hashes, int used, std::vector<uint64_t>& set) {
  const int bits = std::bit_width(hashes.size()) + 1;
  set.assign(size_t{1} << bits, 0);
  const size_t mask = set.size() - 1;
  for (uint64_t hash : hashes) {
    size_t at = hash << used >> (64 - bits);
    for (; set[at]; at = (at + 1) & mask)
      if (set[at] == hash) return hash;
    set[at] = hash;
  }
  return 0;
}

// Hashes in parts, by the bits after the `used` highest, which all have in common. `visit` calls what it is given with each
// of them, the same ones each time.
class Parts {
 public:
  template <typename Visit>
  Parts(const Visit& visit, size_t count, int used)
      : bits_(std::clamp(static_cast<int>(std::bit_width(count / kHashesOfPart)), 1, kMostPartBits)), sorted_(count) {
    const auto part_of = [&](uint64_t hash) { return hash << used >> (64 - bits_); };
    visit([&](uint64_t hash) { ++ends_[part_of(hash) + 1]; });
    for (size_t part = 1; part < ends_.size(); ++part) ends_[part] += ends_[part - 1];
    auto at = ends_;
    visit([&](uint64_t hash) { sorted_.get()[at[part_of(hash)]++] = hash; });
  }

  int bits() const { return bits_; }
  size_t count() const { return size_t{1} << bits_; }
  std::span<const uint64_t> operator[](size_t part) const {
    return {sorted_.get() + ends_[part], ends_[part + 1] - ends_[part]};
  }

 private:
  int bits_;
  std::array<size_t, (1 << kMostPartBits) + 1> ends_{};
  Kept<uint64_t> sorted_;
};

uint64_t repeated(const Parts& parts, std::vector<uint64_t>& set) {
  for (size_t p = 0; p < parts.count(); ++p) {
    const auto some = parts[p];
    uint64_t twice = 0;
    if (some.size() <= 2 * kHashesOfPart) {
      twice = repeated_in_part(some, parts.bits(), set);
    } else {
      const Parts finer([&](const auto& each) { std::for_each(some.begin(), some.end(), each); }, some.size(),
                        parts.bits());
      for (size_t q = 0; q < finer.count() && !twice; ++q)
        twice = repeated_in_part(finer[q], parts.bits() + finer.bits(), set);
    }
    if (twice) return twice;
  }
  return 0;
}

}  // namespace

std::optional<int64_t> repeated_key(std::span<const std::span<const int64_t>> pieces) {
  if (ascend(pieces)) return std::nullopt;
  const uint64_t seed = process_seed();
  size_t count = 0, zeros = 0;
  // 0 marks an empty place in a set, so the one key whose hash is 0 is counted separately.
  for (const auto& piece : pieces)
    for (int64_t key : piece) {
      const bool is_zero = !hash_of(key, seed);
      zeros += is_zero;
      count += !is_zero;
    }
  const auto visit = [&](const auto& each) {
    for (const auto& piece : pieces)
      for (int64_t key : piece)
        if (const uint64_t hash = hash_of(key, seed)) each(hash);
  };
  std::vector<uint64_t> set;
  const uint64_t twice = zeros > 1 ? 0 : repeated(Parts(visit, count, 0), set);
  if (!twice && zeros < 2) return std::nullopt;
  for (const auto& piece : pieces)
    for (int64_t key : piece)
      if (hash_of(key, seed) == twice) return key;
  return std::nullopt;
}

bool all_finite16(std::span<const uint16_t> floats, uint16_t exponent) {
  uint16_t bad = 0;  // without a branch, so that it is vectorised
  for (uint16_t bits : floats) bad |= static_cast<uint16_t>((bits & exponent) == exponent);
  return !bad;
}

namespace {

// The same, where `bucket` is that of a key.
template <typename Bucket>
BucketedKeys look(std::span<const int64_t> keys, uint64_t first, uint64_t last, const Bucket& bucket) {
  const uint64_t seed = process_seed();
  BucketedKeys found;
  std::vector<uint64_t> hashes, set;
  uint64_t least = first;
  size_t begin = 0;
  for (size_t end = 0; begin < keys.size() && !found.repeated; begin = end) {
    const uint64_t now = bucket(keys[begin]);
    if (now < least || now > last) {
      found.misplaced = static_cast<int64_t>(begin);
      return found;
    }
    least = now;
    size_t zeros = 0;
    hashes.clear();
    for (end = begin; end < keys.size() && bucket(keys[end]) == now; ++end) {
      const uint64_t hash = hash_of(keys[end], seed);
      zeros += !hash;
      if (hash) hashes.push_back(hash);
    }
    if (!begin) found.head = static_cast<int64_t>(end);
    found.tail = static_cast<int64_t>(begin);
    const auto some = keys.subspan(begin, end - begin);
    const bool is_large = hashes.size() > 2 * kHashesOfPart;
    if (zeros > 1 || is_large || repeated_in_part(hashes, 0, set)) {
      const std::span<const int64_t> pieces[] = {some};
      found.repeated = repeated_key(pieces);
    }
  }
  return found;
}

}  // namespace

BucketedKeys look_by_bucket(std::span<const int64_t> keys, uint64_t buckets, uint64_t first, uint64_t last) {
  // A division takes longer than all else.
  if (std::has_single_bit(buckets))
    return look(keys, first, last,
                [mask = buckets - 1](int64_t key) { return mix64(static_cast<uint64_t>(key)) & mask; });
  return look(keys, first, last, [buckets](int64_t key) { return bucket_of(key, buckets); });
}

}  // namespace shoal
