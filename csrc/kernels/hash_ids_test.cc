#include "kernels/hash_ids.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/xxh64.h"

namespace shoal {
namespace {

// More than one task, and a last one that is not full.
constexpr int64_t kMany = 3 * 8192 + 17;

int64_t hash_of(const std::string& text) { return static_cast<int64_t>(xxh64(text.data(), text.size())); }

std::vector<std::string> texts(int64_t n) {
  Random random(7);
  std::vector<std::string> made(static_cast<size_t>(n));
  for (std::string& text : made) {
    text.resize(static_cast<size_t>(random.below(70)));
    for (char& byte : text) byte = static_cast<char>(random.next());
  }
  return made;
}

template <typename Offset>
void strings_behind_one_another() {
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{5}, kMany})
    for (size_t shift : {0, 1, 3}) {
      std::vector<std::string> made = texts(n);
      std::string data(shift, '?');
      std::vector<Offset> offsets{static_cast<Offset>(shift)};
      std::vector<int64_t> wanted;
      for (const std::string& text : made) {
        data += text;
        offsets.push_back(static_cast<Offset>(data.size()));
        wanted.push_back(hash_of(text));
      }
      int64_t bytes = static_cast<int64_t>(data.size());
      for (int threads : {1, 2, 5}) {
        std::vector<int64_t> out(made.size(), -7);
        CHECK(hash_strings(data.data(), bytes, offsets.data(), n, out.data(), threads) == kNoneWrong);
        CHECK(out == wanted, n, shift, threads);
      }
    }
}

template <typename Offset>
void offsets_that_point_elsewhere_are_refused() {
  std::string data(static_cast<size_t>(kMany), 'x');
  for (int threads : {1, 4}) {
    std::vector<Offset> offsets(static_cast<size_t>(kMany) + 1);
    for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<Offset>(i);
    std::vector<int64_t> out(static_cast<size_t>(kMany));
    offsets[20000] = -1;  // the end of 19999
    CHECK(hash_strings(data.data(), kMany, offsets.data(), kMany, out.data(), threads) == 19999);
    offsets[9000] = 1;  // before where 8999 begins
    CHECK(hash_strings(data.data(), kMany, offsets.data(), kMany, out.data(), threads) == 8999);
    offsets[3] = static_cast<Offset>(kMany + 1);
    CHECK(hash_strings(data.data(), kMany, offsets.data(), kMany, out.data(), threads) == 2);
    offsets[0] = -4;
    CHECK(hash_strings(data.data(), kMany, offsets.data(), kMany, out.data(), threads) == 0);
  }
}

void padding_is_no_part_of_a_string() {
  for (int64_t width : {0, 1, 7, 33}) {
    std::vector<char> data(static_cast<size_t>(width * kMany), 0);
    std::vector<int64_t> wanted;
    Random random(3);
    for (int64_t i = 0; i < kMany; ++i) {
      std::string text(static_cast<size_t>(random.below(width + 1)), 'a');
      if (text.size() > 2) text[1] = 0;  // inside it stays
      if (!text.empty()) std::memcpy(data.data() + i * width, text.data(), text.size());
      wanted.push_back(hash_of(text));
    }
    for (int threads : {1, 3}) {
      std::vector<int64_t> out(static_cast<size_t>(kMany));
      hash_padded(data.data(), width, kMany, out.data(), threads);
      CHECK(out == wanted, width, threads);
    }
  }
}

void code_points_are_hashed_as_utf8() {
  struct Line {
    std::vector<uint32_t> points;
    std::string utf8;
  };
  const std::vector<Line> lines = {
      {{}, ""},
      {{0x41, 0, 0x42}, std::string("A\0B", 3)},
      {{0x7f, 0x80, 0x7ff}, "\x7f\xc2\x80\xdf\xbf"},
      {{0x800, 0xd7ff, 0xe000, 0xffff}, "\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf"},
      {{0x10000, 0x10ffff}, "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"},
  };
  const int64_t width = 5;
  std::vector<uint32_t> data(static_cast<size_t>(width * kMany), 0);
  std::vector<int64_t> wanted;
  for (int64_t i = 0; i < kMany; ++i) {
    const Line& line = lines[static_cast<size_t>(i) % lines.size()];
    std::copy(line.points.begin(), line.points.end(), data.begin() + i * width);
    wanted.push_back(hash_of(line.utf8));
  }
  for (int threads : {1, 3}) {
    std::vector<int64_t> out(static_cast<size_t>(kMany));
    CHECK(hash_utf32(data.data(), width, kMany, out.data(), threads) == kNoneWrong);
    CHECK(out == wanted, threads);
    for (uint32_t bad : {0xd800u, 0xdfffu, 0x110000u, 0xffffffffu}) {
      std::vector<uint32_t> broken = data;
      broken[static_cast<size_t>(20000 * width + 4)] = bad;
      CHECK(hash_utf32(broken.data(), width, kMany, out.data(), threads) == 20000, bad);
      broken[static_cast<size_t>(9000 * width)] = bad;
      CHECK(hash_utf32(broken.data(), width, kMany, out.data(), threads) == 9000, bad);
    }
  }
  std::vector<int64_t> out(3);
  CHECK(hash_utf32(data.data(), 0, 3, out.data(), 1) == kNoneWrong);
  for (int64_t hash : out) CHECK(hash == hash_of(""));
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::strings_behind_one_another<int32_t>();
  shoal::strings_behind_one_another<int64_t>();
  shoal::offsets_that_point_elsewhere_are_refused<int32_t>();
  shoal::offsets_that_point_elsewhere_are_refused<int64_t>();
  shoal::padding_is_no_part_of_a_string();
  shoal::code_points_are_hashed_as_utf8();
}
