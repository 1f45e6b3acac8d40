#include "device/program.h"

#include <algorithm>
#include <bit>
#include <string>

namespace shoal {

// The driver reads as many bytes of an argument as the kernel wants, from the front.
static_assert(std::endian::native == std::endian::little);

void Program::add_kernel(uint64_t function, uint32_t threads, uint32_t shared_bytes,
                         const std::array<Argument, 3>& grid, std::vector<Argument> arguments) {
  most_arguments_ = std::max(most_arguments_, arguments.size());
  for (const Argument& argument : arguments) most_variables_ = std::max(most_variables_, argument.variable + 1);
  for (const Argument& extent : grid) most_variables_ = std::max(most_variables_, extent.variable + 1);
  launches_.push_back(
      {reinterpret_cast<void*>(function), threads, shared_bytes, 0, grid, std::move(arguments)});
}

void Program::add_fill(Argument address, Argument words, uint32_t word) {
  most_variables_ = std::max({most_variables_, address.variable + 1, words.variable + 1});
  launches_.push_back({nullptr, 0, 0, word, {}, {address, words}});
}

Status Program::run(uint64_t stream, const std::vector<int64_t>& variables) const {
  if (variables.size() < size_t(most_variables_)) {
    return {Code::device, "[device] a program wants " + std::to_string(most_variables_) + " variables; got " +
                             std::to_string(variables.size()) + "."};
  }
  auto value = [&](const Argument& argument) {
    return argument.fixed + (argument.variable < 0 ? 0 : variables[argument.variable]);
  };
  std::vector<int64_t> values(most_arguments_);
  std::vector<void*> addresses(most_arguments_);
  for (size_t i = 0; i < most_arguments_; ++i) addresses[i] = &values[i];
  void* on = reinterpret_cast<void*>(stream);
  for (const Launch& launch : launches_) {
    std::transform(launch.arguments.begin(), launch.arguments.end(), values.begin(), value);
    int error = 0;
    if (launch.function == nullptr) {
      if (values[1] > 0) error = driver_.fill_words(uint64_t(values[0]), launch.word, size_t(values[1]), on);
    } else {
      const int64_t x = value(launch.grid[0]), y = value(launch.grid[1]), z = value(launch.grid[2]);
      if (x > 0 && y > 0 && z > 0) {
        error = driver_.launch(launch.function, unsigned(x), unsigned(y), unsigned(z), launch.threads, 1, 1,
                               launch.shared_bytes, on, addresses.data(), nullptr);
      }
    }
    if (error != 0) return failed(error);
  }
  return {};
}

Status Program::failed(int error) const {
  const char* text = nullptr;
  driver_.describe(error, &text);
  return {Code::device, "[device] the CUDA driver refused a launch: " + std::string(text ? text : "?") + " (" +
                           std::to_string(error) + "). An earlier kernel may have failed: try CUDA_LAUNCH_BLOCKING=1."};
}

}  // namespace shoal
