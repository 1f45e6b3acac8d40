// One thing for the device to do, and what it takes in a call.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace shoal {

// A number that a launch takes: fixed, or fixed plus what the call gives as its variable of that number.
struct Argument {
  int64_t fixed = 0;
  int32_t variable = -1;
};

struct Launch {
  enum class Kind { kernel, fill, copy_to_host, record };

  Kind kind;
  void* function = nullptr;
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
  uint32_t word = 0;
  std::array<Argument, 3> grid{};
  // Of a kernel its own; of a fill address and words; of a copy to, from and bytes; of a record the event.
  std::vector<Argument> arguments;
};

// Its numbers in one call.
struct Numbers {
  std::array<int64_t, 3> grid;
  std::vector<int64_t> arguments;

  bool operator==(const Numbers&) const = default;

  // Whether there is something to do.
  bool has_work(Launch::Kind kind) const {
    if (kind == Launch::Kind::kernel) return grid[0] > 0 && grid[1] > 0 && grid[2] > 0;
    return kind != Launch::Kind::fill || arguments[1] > 0;
  }
};

}  // namespace shoal
