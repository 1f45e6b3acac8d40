#define SHOAL_ISA test
#include "kernels/vec.h"
// clang-format off: births use vec.h
#include "kernels/birth_isa.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/rows_io.h"
#include "store/dram.h"

namespace shoal {
namespace {

constexpr int32_t kDims[] = {1, 3, 15, 16, 17, 63, 64, 65, 100, 129, 300};
const std::vector<int64_t> kKeys = {0, 1, -1, 12345678901234, INT64_MIN, INT64_MAX};

// Word i of a row, one block at a time.
uint32_t word_of(uint64_t stream, int64_t key, int32_t i) {
  uint32_t words[test::kPhiloxWords];
  test::philox_blocks(stream, static_cast<uint64_t>(key), static_cast<uint32_t>(i / 4), 0, words);
  return words[i % 4];
}

std::vector<uint32_t> take(DramStore& store, size_t n) {
  std::vector<uint32_t> slots(n);
  CHECK(store.reserve(static_cast<int64_t>(n)).ok());
  store.take(slots.data(), static_cast<int64_t>(n));
  return slots;
}

std::vector<float> born(const Init& init, const std::vector<int64_t>& keys, int32_t dim, Dtype dtype = Dtype::f32) {
  DramStore store(dim, dtype, 0);
  std::vector<uint32_t> slots = take(store, keys.size());
  std::vector<float> out(keys.size() * static_cast<size_t>(dim));
  int64_t n = static_cast<int64_t>(keys.size());
  birth(store.rows(), init, nullptr, {}, keys.data(), slots.data(), n, 2);
  read_weights(store.rows(), {}, keys.data(), slots.data(), n, out.data(), 2);
  // A read of a missing row gives the same.
  std::vector<uint32_t> none(keys.size(), kNoSlot);
  std::vector<float> missing(out.size());
  read_weights(store.rows(), init, keys.data(), none.data(), n, missing.data(), 2);
  CHECK(out == missing, dim);
  return out;
}

void uniform_is_low_plus_u_times_width() {
  Init init{InitKind::uniform, -0.01f, 0.02f, 0x123456789abcdefULL};
  for (const std::string& isa : available_isas())
    for (int32_t dim : kDims) {
      CHECK(set_isa(isa), isa);
      std::vector<float> rows = born(init, kKeys, dim);
      for (size_t k = 0; k < kKeys.size(); ++k)
        for (int32_t i = 0; i < dim; ++i) {
          float u = static_cast<float>(word_of(init.stream, kKeys[k], i) >> 8) * 0x1p-24f;
          float wanted = init.a + u * init.b, got = rows[k * static_cast<size_t>(dim) + static_cast<size_t>(i)];
          CHECK(got == wanted, isa, dim, kKeys[k], i, got, wanted);
        }
    }
}

void normal_is_the_inverse_of_its_distribution() {
  // The upper tail beyond unit_normal(word) holds (word + 1/2) / 2^32 of all probability.
  Random random(1);
  std::vector<uint32_t> words;
  for (uint32_t word = 0; word < 5000; ++word) words.push_back(word);
  for (int bit = 0; bit < 31; ++bit)
    for (int64_t near = -3; near <= 3; ++near)
      words.push_back(static_cast<uint32_t>(std::clamp<int64_t>((int64_t{1} << bit) + near, 0, 0x7fffffff)));
  for (int i = 0; i < 200000; ++i) words.push_back(static_cast<uint32_t>(random.next()) & 0x7fffffffu);
  words.push_back(0x7fffffffu);
  for (uint32_t word : words) {
    float z = test::unit_normal(word);
    double tail = 0.5 * std::erfc(static_cast<double>(z) / std::sqrt(2.0)), wanted = (word + 0.5) * 0x1p-32;
    // A float's rounding of z moves the tail by about z^2 2^-24 of itself; the table is a little coarser between knots.
    CHECK(std::fabs(tail / wanted - 1) < 2e-4, word, z, tail, wanted);
    CHECK(test::unit_normal(word | 0x80000000u) == -z, word, z);
  }
}

void normal_is_the_same_on_every_instruction_set() {
  Init init{InitKind::normal, 0.5f, 2.0f, 77};
  for (const std::string& isa : available_isas())
    for (int32_t dim : kDims) {
      CHECK(set_isa(isa), isa);
      std::vector<float> rows = born(init, kKeys, dim);
      for (size_t k = 0; k < kKeys.size(); ++k)
        for (int32_t i = 0; i < dim; ++i) {
          float wanted = init.a + test::unit_normal(word_of(init.stream, kKeys[k], i)) * init.b;
          float got = rows[k * static_cast<size_t>(dim) + static_cast<size_t>(i)];
          CHECK(got == wanted, isa, dim, kKeys[k], i, got, wanted);
        }
    }
}

void moments_are_right() {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 4000; ++key) keys.push_back(key);
  auto check = [&](const Init& init, double mean, double deviation, double least, double most) {
    double sum = 0, squares = 0;
    std::vector<float> rows = born(init, keys, 50);
    for (float x : rows) {
      CHECK(x >= least && x <= most, x);
      sum += x;
      squares += static_cast<double>(x) * x;
    }
    double n = static_cast<double>(rows.size()), got = sum / n;
    CHECK(std::fabs(got - mean) < 5 * deviation / std::sqrt(n), got, mean);
    CHECK(std::fabs(std::sqrt(squares / n - got * got) / deviation - 1) < 0.01, deviation);
  };
  check({InitKind::uniform, -1.0f, 3.0f, 5}, 0.5, 3 / std::sqrt(12.0), -1, 2);
  check({InitKind::normal, -1.0f, 3.0f, 5}, -1, 3, -30, 30);
}

void zeros_and_constants() {
  for (const std::string& isa : available_isas())
    for (int32_t dim : kDims) {
      CHECK(set_isa(isa), isa);
      for (float x : born({InitKind::zeros, 9.0f, 9.0f, 9}, kKeys, dim)) CHECK(x == 0.0f, isa, dim, x);
      for (float x : born({InitKind::constant, -0.25f, 9.0f, 9}, kKeys, dim)) CHECK(x == -0.25f, isa, dim, x);
    }
}

void sixteen_bit_rows_are_the_float_rows_rounded() {
  Init init{InitKind::uniform, -0.01f, 0.02f, 3};
  for (const std::string& isa : available_isas())
    for (int32_t dim : kDims) {
      CHECK(set_isa(isa), isa);
      std::vector<float> wide = born(init, kKeys, dim), f16 = born(init, kKeys, dim, Dtype::f16),
                         bf16 = born(init, kKeys, dim, Dtype::bf16);
      for (size_t i = 0; i < wide.size(); ++i) {
        CHECK(f16[i] == test::from_f16(test::to_f16(wide[i])), isa, dim, i);
        CHECK(bf16[i] == test::from_bf16(test::to_bf16(wide[i])), isa, dim, i);
      }
    }
}

void a_row_depends_on_nothing_but_stream_key_and_element() {
  Init init{InitKind::uniform, 0.0f, 1.0f, 11};
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 5000; ++key) keys.push_back(key * key - 1000);
  std::vector<float> all = born(init, keys, 20), longer = born(init, keys, 33);
  for (size_t k = 0; k < keys.size(); ++k)
    for (size_t i = 0; i < 20; ++i) CHECK(all[20 * k + i] == longer[33 * k + i], k, i);
  std::vector<int64_t> reversed(keys.rbegin(), keys.rend());
  std::vector<float> backwards = born(init, reversed, 20);
  for (size_t k = 0; k < keys.size(); ++k)
    for (size_t i = 0; i < 20; ++i) CHECK(all[20 * k + i] == backwards[20 * (keys.size() - 1 - k) + i], k, i);
  init.stream = 12;
  CHECK(born(init, keys, 20) != all);
}

void a_birth_sets_state_score_and_flags() {
  DramStore store(7, Dtype::f32, 3);
  constexpr size_t kRows = 3000;
  std::vector<uint32_t> slots = take(store, kRows);
  std::vector<int64_t> keys(kRows, 1);
  const Rows& rows = store.rows();
  for (uint32_t slot : slots) {
    rows.flags(rows.tail(slot)) = kErased;  // of a row that was here before
    rows.set_score(rows.tail(slot), 99.0);
  }
  const float state[3] = {1.0f, 2.0f, 3.0f};
  for (int threads : {1, 3}) {
    birth(rows, {InitKind::constant, 4.0f, 0.0f, 0}, state, {17.0 + threads, 9}, keys.data(), slots.data(), kRows,
          threads);
    for (uint32_t slot : slots) {
      char* tail = rows.tail(slot);
      CHECK(rows.state(tail)[0] == 1.0f && rows.state(tail)[1] == 2.0f && rows.state(tail)[2] == 3.0f, slot);
      CHECK(rows.score(tail) == 17.0 + threads && rows.flags(tail) == stamped(kChanged | kDirty, 9), slot,
            rows.flags(tail));
      for (int i = 0; i < 7; ++i) CHECK(reinterpret_cast<float*>(rows.weights(slot))[i] == 4.0f, slot, i);
    }
  }
  birth(rows, {}, state, {}, nullptr, nullptr, 0, 2);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::uniform_is_low_plus_u_times_width();
  shoal::normal_is_the_inverse_of_its_distribution();
  shoal::normal_is_the_same_on_every_instruction_set();
  shoal::moments_are_right();
  shoal::zeros_and_constants();
  shoal::sixteen_bit_rows_are_the_float_rows_rounded();
  shoal::a_row_depends_on_nothing_but_stream_key_and_element();
  shoal::a_birth_sets_state_score_and_flags();
}
