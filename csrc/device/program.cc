#include "device/program.h"

#include <algorithm>
#include <bit>
#include <string>

namespace shoal {

// The driver reads as many bytes of an argument as the kernel wants, from the front.
static_assert(std::endian::native == std::endian::little);

void Program::add(Launch launch) {
  most_arguments_ = std::max(most_arguments_, launch.arguments.size());
  for (const Argument& argument : launch.arguments) most_variables_ = std::max(most_variables_, argument.variable + 1);
  for (const Argument& extent : launch.grid) most_variables_ = std::max(most_variables_, extent.variable + 1);
  launches_.push_back(std::move(launch));
}

void Program::add_kernel(uint64_t function, uint32_t threads, uint32_t shared_bytes,
                         const std::array<Argument, 3>& grid, std::vector<Argument> arguments) {
  add({Kind::kernel, reinterpret_cast<void*>(function), threads, shared_bytes, 0, grid, std::move(arguments)});
}

void Program::add_fill(Argument address, Argument words, uint32_t word) {
  add({Kind::fill, nullptr, 0, 0, word, {}, {address, words}});
}

void Program::add_copy_to_host(Argument to, Argument from, Argument bytes) {
  add({Kind::copy_to_host, nullptr, 0, 0, 0, {}, {to, from, bytes}});
}

void Program::add_record(Argument event) { add({Kind::record, nullptr, 0, 0, 0, {}, {event}}); }

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
  for (const Launch& launch : launches_) {
    std::transform(launch.arguments.begin(), launch.arguments.end(), values.begin(), value);
    const int64_t grid[3] = {value(launch.grid[0]), value(launch.grid[1]), value(launch.grid[2])};
    const int error = run(launch, grid, values.data(), addresses.data(), reinterpret_cast<void*>(stream));
    if (error != 0) return failed(error);
  }
  return {};
}

int Program::run(const Launch& launch, const int64_t* grid, int64_t* values, void** addresses, void* stream) const {
  switch (launch.kind) {
    case Kind::kernel:
      if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return 0;
      return driver_.launch(launch.function, unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2]), launch.threads, 1,
                            1, launch.shared_bytes, stream, addresses, nullptr);
    case Kind::fill:
      return values[1] <= 0 ? 0 : driver_.fill_words(uint64_t(values[0]), launch.word, size_t(values[1]), stream);
    case Kind::copy_to_host:
      return driver_.copy_to_host(reinterpret_cast<void*>(values[0]), uint64_t(values[1]), size_t(values[2]), stream);
    case Kind::record: return driver_.record(reinterpret_cast<void*>(values[0]), stream);
  }
  return 0;
}

Status Program::failed(int error) const {
  const char* text = nullptr;
  driver_.describe(error, &text);
  return {Code::device, "[device] the CUDA driver refused a launch: " + std::string(text ? text : "?") + " (" +
                            std::to_string(error) +
                            "). An earlier kernel may have failed: try CUDA_LAUNCH_BLOCKING=1."};
}

}  // namespace shoal
