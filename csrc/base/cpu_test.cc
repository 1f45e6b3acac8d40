#include "base/cpu.h"

#include "base/check.h"

namespace shoal {
namespace {

void starts_with_the_best() { CHECK(active_isa() == best_isa(), isa_name(active_isa()), isa_name(best_isa())); }

void every_available_isa_can_be_chosen() {
  CHECK(!available_isas().empty());
  for (const std::string& name : available_isas()) {
    CHECK(set_isa(name), name);
    CHECK(isa_name(active_isa()) == name, name, isa_name(active_isa()));
  }
  CHECK(isa_name(best_isa()) == available_isas().back());
}

void unknown_isa_changes_nothing() {
  Isa before = active_isa();
  for (const char* name : {"", "v1", "v5", "V3", "avx2"}) CHECK(!set_isa(name), name);
  CHECK(active_isa() == before);
}

}  // namespace
}  // namespace shoal

int main() {
  shoal::starts_with_the_best();
  shoal::every_available_isa_can_be_chosen();
  shoal::unknown_isa_changes_nothing();
}
