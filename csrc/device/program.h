// Launches of compiled GPU kernels, one behind the other, in one call. A step of training is a dozen launches with twenty
// arguments each, of which few differ from those of the step before: a program holds the others.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "device/driver.h"

namespace shoal {

// A number that a launch takes: fixed, or fixed plus what the call gives as its variable of that number.
struct Argument {
  int64_t fixed = 0;
  int32_t variable = -1;
};

class Program {
 public:
  explicit Program(const Driver& driver) : driver_(driver) {}

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
  Status run(uint64_t stream, const std::vector<int64_t>& variables) const;

 private:
  enum class Kind { kernel, fill, copy_to_host, record };

  struct Launch {
    Kind kind;
    void* function = nullptr;
    uint32_t threads = 0;
    uint32_t shared_bytes = 0;
    uint32_t word = 0;
    std::array<Argument, 3> grid{};
    std::vector<Argument> arguments;
  };

  void add(Launch launch);
  int run(const Launch& launch, const int64_t* grid, int64_t* values, void** addresses, void* stream) const;
  Status failed(int error) const;

  Driver driver_;
  std::vector<Launch> launches_;
  size_t most_arguments_ = 3;
  int32_t most_variables_ = 0;
};

}  // namespace shoal
