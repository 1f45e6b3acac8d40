#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace shoal {

static_assert(std::endian::native == std::endian::little);

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // bits reversed

// Eight tables, so that eight bytes are looked up at the same time.
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t table = 1; table < 8; ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[table - 1][byte];
      tables[table][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32c_native(const char* at, size_t bytes, uint32_t crc) {
  uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = uint32_t(wide);
  for (; bytes > 0; --bytes, ++at) crc = _mm_crc32_u8(crc, uint8_t(*at));
  return crc;
}

__attribute__((target("sse4.2"))) void quarters_native(const char* at, size_t quarter, uint32_t* crcs) {
  uint64_t wide[4] = {~uint32_t{0}, ~uint32_t{0}, ~uint32_t{0}, ~uint32_t{0}};
  for (size_t i = 0; i < quarter; i += 8) {
    for (int lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, at + size_t(lane) * quarter + i, 8);
      wide[lane] = _mm_crc32_u64(wide[lane], word);
    }
  }
  for (int lane = 0; lane < 4; ++lane) crcs[lane] = ~uint32_t(wide[lane]);
}

bool has_native() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
uint32_t crc32c_native(const char* at, size_t bytes, uint32_t crc) {
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; --bytes, ++at) crc = __crc32cb(crc, uint8_t(*at));
  return crc;
}

bool has_native() { return true; }
#else
uint32_t crc32c_native(const char*, size_t, uint32_t crc) { return crc; }
bool has_native() { return false; }
#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t before) {
  const char* at = static_cast<const char*>(data);
  uint32_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= crc;
    crc = 0;
    for (int byte = 0; byte < 8; ++byte) crc ^= kTables[7 - byte][(word >> (8 * byte)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ uint8_t(*at)) & 0xff];
  return ~crc;
}

uint32_t crc32c_of_quarters(const void* data, size_t bytes) {
  const char* const at = static_cast<const char*>(data);
  const size_t quarter = bytes / 4;
  uint32_t crcs[4];
#if defined(__x86_64__)
  static const bool native = has_native();
  if (native) {
    quarters_native(at, quarter, crcs);
    return crc32c(crcs, sizeof crcs);
  }
#endif
  for (size_t lane = 0; lane < 4; ++lane) crcs[lane] = crc32c(at + lane * quarter, quarter);
  return crc32c(crcs, sizeof crcs);
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
  static const bool native = has_native();
  if (!native) return crc32c_portable(data, bytes, before);
  return ~crc32c_native(static_cast<const char*>(data), bytes, ~before);
}

}  // namespace shoal
