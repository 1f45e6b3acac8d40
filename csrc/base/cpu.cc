#include "base/cpu.h"

#include <atomic>

namespace shoal {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return Isa::v4;
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::v3;
  return Isa::v2;
#else
  return Isa::plain;
#endif
}

static std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::v4: return "v4";
    case Isa::v3: return "v3";
    case Isa::v2: return "v2";
    default: return "plain";
  }
}

std::vector<std::string> available_isas() {
  if (best_isa() == Isa::plain) return {"plain"};
  std::vector<std::string> names;
  for (Isa isa : {Isa::v2, Isa::v3, Isa::v4})
    if (isa <= best_isa()) names.push_back(isa_name(isa));
  return names;
}

bool set_isa(const std::string& name) {
  for (Isa isa : {Isa::plain, Isa::v2, Isa::v3, Isa::v4}) {
    bool built = (isa == Isa::plain) == (best_isa() == Isa::plain);
    if (name == isa_name(isa) && built && isa <= best_isa()) {
      active().store(isa);
      return true;
    }
  }
  return false;
}

}  // namespace shoal
