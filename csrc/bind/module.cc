#include "bind/bind.h"

NB_MODULE(_native, m) {
  shoal::nb::set_leak_warnings(false);  // torch.compile keeps tables alive until the process ends
  m.doc() = "Shoal's native core: pointers in, pointers out. Internal; use the shoal package.";
  shoal::bind_base(m);
  shoal::bind_file(m);
  shoal::bind_store(m);
  shoal::bind_index(m);
  shoal::bind_kernels(m);
  shoal::bind_lookup(m);
  shoal::bind_device(m);
}
