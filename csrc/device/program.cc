#include "device/program.h"

#include <algorithm>
#include <bit>
#include <string>

namespace shoal {

// The driver reads as many bytes of an argument as the kernel wants, from the front.
static_assert(std::endian::native == std::endian::little);

Program::Program(const Driver& driver, bool as_graph) : driver_(driver) {
  if (as_graph && driver.graphs.create != nullptr) graph_ = std::make_unique<LaunchGraph>(driver);
}

void Program::add(Launch launch) {
  for (const Argument& argument : launch.arguments) most_variables_ = std::max(most_variables_, argument.variable + 1);
  for (const Argument& extent : launch.grid) most_variables_ = std::max(most_variables_, extent.variable + 1);
  launches_.push_back(std::move(launch));
}

void Program::add_kernel(uint64_t function, uint32_t threads, uint32_t shared_bytes,
                         const std::array<Argument, 3>& grid, std::vector<Argument> arguments) {
  add({Launch::Kind::kernel, reinterpret_cast<void*>(function), threads, shared_bytes, 0, grid, std::move(arguments)});
}

void Program::add_fill(Argument address, Argument words, uint32_t word) {
  add({Launch::Kind::fill, nullptr, 0, 0, word, {}, {address, words}});
}

void Program::add_copy_to_host(Argument to, Argument from, Argument bytes) {
  add({Launch::Kind::copy_to_host, nullptr, 0, 0, 0, {}, {to, from, bytes}});
}

void Program::add_record(Argument event) { add({Launch::Kind::record, nullptr, 0, 0, 0, {}, {event}}); }

Status Program::run(uint64_t stream, const std::vector<int64_t>& variables) {
  if (variables.size() < size_t(most_variables_)) {
    return {Code::device, "[device] a program wants " + std::to_string(most_variables_) + " variables; got " +
                              std::to_string(variables.size()) + "."};
  }
  auto value = [&](const Argument& argument) {
    return argument.fixed + (argument.variable < 0 ? 0 : variables[argument.variable]);
  };
  std::vector<Numbers> numbers(launches_.size());
  for (size_t at = 0; at < launches_.size(); ++at) {
    const Launch& launch = launches_[at];
    std::transform(launch.grid.begin(), launch.grid.end(), numbers[at].grid.begin(), value);
    numbers[at].arguments.resize(launch.arguments.size());
    std::transform(launch.arguments.begin(), launch.arguments.end(), numbers[at].arguments.begin(), value);
  }
  void* const on = reinterpret_cast<void*>(stream);
  if (const int error = enter_context()) return driver_failed(driver_, "a context", error);
  if (graph_ != nullptr && !is_capturing(on)) {
    if (graph_->set(launches_, numbers) == 0) {
      const int error = graph_->start(on);
      return error == 0 ? Status() : driver_failed(driver_, "a launch", error);
    }
    graph_.reset();  // if it is the device that fails, launches say so
  }
  const int error = run_one_by_one(numbers, on);
  return error == 0 ? Status() : driver_failed(driver_, "a launch", error);
}

int Program::run_one_by_one(const std::vector<Numbers>& numbers, void* stream) const {
  for (size_t at = 0; at < launches_.size(); ++at) {
    if (!numbers[at].has_work(launches_[at].kind)) continue;
    if (const int error = run_one(launches_[at], numbers[at], stream)) return error;
  }
  return 0;
}

int Program::run_one(const Launch& launch, const Numbers& numbers, void* stream) const {
  const std::vector<int64_t>& given = numbers.arguments;
  switch (launch.kind) {
    case Launch::Kind::kernel: {
      std::vector<void*> addresses;
      for (const int64_t& argument : given) addresses.push_back(const_cast<int64_t*>(&argument));
      const auto& [x, y, z] = numbers.grid;
      return driver_.launch(launch.function, unsigned(x), unsigned(y), unsigned(z), launch.threads, 1, 1,
                            launch.shared_bytes, stream, addresses.data(), nullptr);
    }
    case Launch::Kind::fill: return driver_.fill_words(uint64_t(given[0]), launch.word, size_t(given[1]), stream);
    case Launch::Kind::copy_to_host:
      return driver_.copy_to_host(reinterpret_cast<void*>(given[0]), uint64_t(given[1]), size_t(given[2]), stream);
    case Launch::Kind::record: return driver_.record(reinterpret_cast<void*>(given[0]), stream);
  }
  return 0;
}

bool Program::is_capturing(void* stream) const {
  int status = 0;
  return driver_.graphs.is_capturing(stream, &status) != 0 || status != 0;
}

// A thread that asked CUDA for nothing yet has no context; the driver, unlike the runtime, gives it none.
int Program::enter_context() {
  void* here = nullptr;
  if (const int error = driver_.context(&here)) return error;
  if (here == nullptr && context_ != nullptr) return driver_.set_context(context_);
  if (context_ == nullptr) context_ = here;
  return 0;
}

}  // namespace shoal
