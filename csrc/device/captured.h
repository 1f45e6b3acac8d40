// Launches of foreign code as a graph: calls while a stream is captured are recorded, not executed.
#pragma once

#include <functional>
#include <memory>

#include "device/driver.h"

namespace shoal {

class CapturedGraph {
 public:
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  Status start(uint64_t stream) const;

 private:
  friend class CaptureStream;
  CapturedGraph(const Driver& driver, void* graph, void* started) : driver_(driver), graph_(graph), started_(started) {}

  Driver driver_;
  void* graph_;
  void* started_;
};

// A stream for captures only, so that no other launches can come between.
class CaptureStream {
 public:
  static Status make(const Driver& driver, std::unique_ptr<CaptureStream>* made);
  ~CaptureStream();
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;

  uint64_t handle() const { return reinterpret_cast<uint64_t>(stream_); }

  // The launches that `work` makes on the stream. If it fails, or the driver refuses, the stream is as before.
  Status capture(const std::function<Status()>& work, std::unique_ptr<CapturedGraph>* graph) const;

 private:
  CaptureStream(const Driver& driver, void* stream) : driver_(driver), stream_(stream) {}

  Driver driver_;
  void* stream_;
};

}  // namespace shoal
