#include "device/launch_graph.h"

#include <algorithm>

namespace shoal {

namespace {

// The driver takes no node without work: such a one gets some, and is not enabled.
unsigned some(int64_t extent) { return unsigned(std::max<int64_t>(extent, 1)); }

KernelNode kernel_node(const Launch& launch, const Numbers& numbers, std::vector<void*>* addresses) {
  addresses->clear();
  for (const int64_t& argument : numbers.arguments) addresses->push_back(const_cast<int64_t*>(&argument));
  const auto& [x, y, z] = numbers.grid;
  return {launch.function,
          {some(x), some(y), some(z)},
          {launch.threads, 1, 1},
          launch.shared_bytes,
          addresses->data(),
          nullptr,
          nullptr,
          nullptr};
}

FillNode fill_node(const Launch& launch, const Numbers& numbers) {
  return {uint64_t(numbers.arguments[0]), 0, launch.word, 4, some(numbers.arguments[1]), 1};
}

CopyNode copy_node(const Numbers& numbers) {
  const int64_t to = numbers.arguments[0], from = numbers.arguments[1], bytes = numbers.arguments[2];
  return {{0, 0, 0, 0, kDeviceMemory, nullptr, uint64_t(from), nullptr, nullptr, 0, 0},
          {0, 0, 0, 0, kHostMemory, reinterpret_cast<void*>(to), 0, nullptr, nullptr, 0, 0},
          size_t(bytes),
          1,
          1};
}

void* event_of(const Numbers& numbers) { return reinterpret_cast<void*>(numbers.arguments[0]); }

}  // namespace

int LaunchGraph::set(const std::vector<Launch>& launches, const std::vector<Numbers>& numbers) {
  for (size_t at = 0; at < numbers_.size(); ++at) {
    if (numbers[at] == numbers_[at]) continue;
    // What cannot be changed, such as memory of another kind, can still be made anew.
    if (change(at, launches[at], numbers[at]) != 0) {
      drop();
      break;
    }
    numbers_[at] = numbers[at];
  }
  if (started_ != nullptr) return 0;
  const int error = make(launches, numbers);
  if (error != 0) drop();
  return error;
}

int LaunchGraph::make(const std::vector<Launch>& launches, const std::vector<Numbers>& numbers) {
  if (const int error = context_of_thread_(&context_)) return error;
  if (const int error = driver_.create(&graph_, 0)) return error;
  for (size_t at = 0; at < launches.size(); ++at) {
    if (const int error = add(launches[at], numbers[at])) return error;
  }
  if (const int error = driver_.instantiate(&started_, graph_, 0)) return error;
  for (size_t at = 0; at < launches.size(); ++at) {
    enabled_.push_back(numbers[at].has_work(launches[at].kind));
    if (enabled_[at]) continue;
    if (const int error = driver_.set_enabled(started_, nodes_[at], 0)) return error;
  }
  numbers_ = numbers;
  return 0;
}

int LaunchGraph::add(const Launch& launch, const Numbers& numbers) {
  void* node = nullptr;
  void* const* before = nodes_.empty() ? nullptr : &nodes_.back();
  const size_t count = nodes_.empty() ? 0 : 1;
  int error = 0;
  switch (launch.kind) {
    case Launch::Kind::kernel: {
      std::vector<void*> addresses;
      const KernelNode kernel = kernel_node(launch, numbers, &addresses);
      error = driver_.add_kernel(&node, graph_, before, count, &kernel);
      break;
    }
    case Launch::Kind::fill: {
      const FillNode fill = fill_node(launch, numbers);
      error = driver_.add_fill(&node, graph_, before, count, &fill, context_);
      break;
    }
    case Launch::Kind::copy_to_host: {
      const CopyNode copy = copy_node(numbers);
      error = driver_.add_copy(&node, graph_, before, count, &copy, context_);
      break;
    }
    case Launch::Kind::record: error = driver_.add_record(&node, graph_, before, count, event_of(numbers)); break;
  }
  nodes_.push_back(node);
  return error;
}

int LaunchGraph::change(size_t at, const Launch& launch, const Numbers& numbers) {
  const bool enabled = numbers.has_work(launch.kind);
  if (enabled != bool(enabled_[at])) {
    if (const int error = driver_.set_enabled(started_, nodes_[at], enabled)) return error;
    enabled_[at] = enabled;
  }
  switch (launch.kind) {
    case Launch::Kind::kernel: {
      std::vector<void*> addresses;
      const KernelNode kernel = kernel_node(launch, numbers, &addresses);
      return driver_.set_kernel(started_, nodes_[at], &kernel);
    }
    case Launch::Kind::fill: {
      const FillNode fill = fill_node(launch, numbers);
      return driver_.set_fill(started_, nodes_[at], &fill, context_);
    }
    case Launch::Kind::copy_to_host: {
      const CopyNode copy = copy_node(numbers);
      return driver_.set_copy(started_, nodes_[at], &copy, context_);
    }
    case Launch::Kind::record: return driver_.set_record(started_, nodes_[at], event_of(numbers));
  }
  return 0;
}

void LaunchGraph::drop() {
  // What was started and still runs is not touched.
  if (started_ != nullptr) driver_.destroy_started(started_);
  if (graph_ != nullptr) driver_.destroy(graph_);
  started_ = graph_ = nullptr;
  nodes_.clear();
  numbers_.clear();
  enabled_.clear();
}

}  // namespace shoal
