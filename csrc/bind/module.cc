#include "bind/bind.h"

NB_MODULE(_native, m) {
  m.doc() = "Shoal's native core: pointers in, pointers out. Internal; use the shoal package.";
  shoal::bind_base(m);
  shoal::bind_store(m);
  shoal::bind_index(m);
  shoal::bind_kernels(m);
}
