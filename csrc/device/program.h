// Launches compiled GPU kernels, one after the other, in one call. A step of training is a dozen launches with twenty
// arguments each, of which few differ from those of the step before: a program holds the others.
#pragma once

#include <atomic>
#include <memory>

#include "device/driver.h"
#include "device/launch.h"
#include "device/launch_graph.h"

namespace shoal {

class Program {
 public:
  // `as_graph`: the launches are kept with the driver where it can. Calls then come one at a time.
  explicit Program(const Driver& driver, bool as_graph = false);

  // A kernel, by its driver's handle. Its arguments are integers of 32 or 64 bits or addresses, in its order.
  void add_kernel(uint64_t function, uint32_t threads, uint32_t shared_bytes, const std::array<Argument, 3>& grid,
                  std::vector<Argument> arguments);

  // So many words of 32 bits at an address, all the same.
  void add_fill(Argument address, Argument words, uint32_t word);

  // So many bytes to pinned memory of the host.
  void add_copy_to_host(Argument to, Argument from, Argument bytes);

  // An event that is there once all before it is done.
  void add_record(Argument event);

  // Launches all on a stream, in the order they were added; one without work to do is left out.
  Status run(uint64_t stream, const std::vector<int64_t>& variables);

 private:
  void add(Launch launch);
  int run_one_by_one(const std::vector<Numbers>& numbers, void* stream) const;
  int run_one(const Launch& launch, const Numbers& numbers, void* stream) const;
  bool is_capturing(void* stream) const;
  int enter_context();

  Driver driver_;
  std::atomic<void*> context_{nullptr};  // that the kernels are of
  std::vector<Launch> launches_;
  int32_t most_variables_ = 0;
  std::unique_ptr<LaunchGraph> graph_;
};

}  // namespace shoal
