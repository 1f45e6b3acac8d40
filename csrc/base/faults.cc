#include "base/faults.h"

namespace shoal {

Faults& Faults::instance() {
  static Faults faults;
  return faults;
}

void Faults::inject(Fault fault) {
  std::lock_guard lock(mutex_);
  faults_.push_back(std::move(fault));
  active_ = true;
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
  active_ = false;
}

int Faults::look(FileCall call, const std::string& path) {
  std::lock_guard lock(mutex_);
  for (Fault& fault : faults_) {
    if (fault.call != call || path.find(fault.path_part) == std::string::npos) continue;
    if (fault.after > 0) {
      --fault.after;
    } else if (fault.times > 0) {
      --fault.times;
      return fault.error;
    }
  }
  return 0;
}

}  // namespace shoal
