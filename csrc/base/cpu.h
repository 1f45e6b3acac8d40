// Which instruction set the *_isa.cc files run with: the best this machine has, or a lower one that a test asked for.
#pragma once

#include <string>
#include <vector>

namespace shoal {

enum class Isa : int { plain = 0, v2 = 1, v3 = 2, v4 = 3 };

Isa best_isa();
Isa active_isa();
// False if this build or this machine does not have it.
bool set_isa(const std::string& name);
const char* isa_name(Isa isa);
std::vector<std::string> available_isas();

}  // namespace shoal

// For small members that *_isa.cc files use: never emitted out of line, where the linker could pick the copy of an
// instruction set that the machine does not have.
#define SHOAL_INLINE __attribute__((always_inline)) inline

// Asks for a line that is needed some fifty lines from now. Into the second-level cache: a core waits for twice as many
// lines there as it has buffers in the first, which makes random rows arrive in 0.6 of the time (Zen 4, two cores:
// 1.4-1.7 ms for 164 k rows of 256 bytes, against 2.5 ms).
namespace shoal {
static SHOAL_INLINE void prefetch_far(const void* line) { __builtin_prefetch(line, 0, 2); }
}  // namespace shoal

// Names of the per-ISA tables: SHOAL_ISA_TABLE(find) is find_v3 in the v3 build.
#define SHOAL_JOIN2(a, b) a##_##b
#define SHOAL_JOIN(a, b) SHOAL_JOIN2(a, b)
#define SHOAL_ISA_TABLE(name) SHOAL_JOIN(name, SHOAL_ISA)

// Declares the tables of every ISA of this build and a function that picks the active one.
#if defined(__x86_64__)
#define SHOAL_DISPATCH(type, name)             \
  extern const type name##_v2;                 \
  extern const type name##_v3;                 \
  extern const type name##_v4;                 \
  inline const type& name() {                  \
    switch (::shoal::active_isa()) {           \
      case ::shoal::Isa::v4: return name##_v4; \
      case ::shoal::Isa::v3: return name##_v3; \
      default: return name##_v2;               \
    }                                          \
  }
#else
#define SHOAL_DISPATCH(type, name) \
  extern const type name##_plain;  \
  inline const type& name() { return name##_plain; }
#endif
