// Launches that the driver has in hand: a call sets the numbers that changed and starts all of them in one go. Eight
// kernels take some 5 microseconds so, one by one eight times that.
#pragma once

#include "device/driver.h"
#include "device/launch.h"

namespace shoal {

class LaunchGraph {
 public:
  explicit LaunchGraph(const Driver& driver) : driver_(driver.graphs), context_of_thread_(driver.context) {}
  ~LaunchGraph() { drop(); }
  LaunchGraph(const LaunchGraph&) = delete;
  LaunchGraph& operator=(const LaunchGraph&) = delete;

  // The driver's error, 0 if there is none, once the numbers of this call are set: the launches are always the same.
  // After an error there is nothing to start.
  int set(const std::vector<Launch>& launches, const std::vector<Numbers>& numbers);

  int start(void* stream) { return driver_.launch(started_, stream); }

 private:
  int make(const std::vector<Launch>& launches, const std::vector<Numbers>& numbers);
  int add(const Launch& launch, const Numbers& numbers);
  int change(size_t at, const Launch& launch, const Numbers& numbers);
  void drop();

  GraphDriver driver_;
  int (*context_of_thread_)(void** context);
  void* context_ = nullptr;
  void* graph_ = nullptr;
  void* started_ = nullptr;
  std::vector<void*> nodes_;
  std::vector<Numbers> numbers_;  // as they are set
  std::vector<char> enabled_;
};

}  // namespace shoal
