#include "index/find_isa.h"
#include "index/probe.h"

namespace shoal {
using namespace SHOAL_ISA;
namespace {

template <typename Key>
size_t find(const IndexView& view, const Key* keys, size_t n, uint32_t* slots) {
  if (n == 0) return 0;
  Finder<Key> finder(view, keys, n, slots);
  while (finder.found() < n) finder.advance();
  return finder.missing();
}

}  // namespace

extern const Probe SHOAL_ISA_TABLE(probe);
const Probe SHOAL_ISA_TABLE(probe) = {find<int64_t>, find<int32_t>};

}  // namespace shoal
