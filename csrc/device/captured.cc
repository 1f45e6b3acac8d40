#include "device/captured.h"

namespace shoal {

CapturedGraph::~CapturedGraph() {
  driver_.graphs.destroy_started(started_);
  driver_.graphs.destroy(graph_);
}

Status CapturedGraph::start(uint64_t stream) const {
  const int error = driver_.graphs.launch(started_, reinterpret_cast<void*>(stream));
  return error == 0 ? Status() : driver_failed(driver_, "a graph's launch", error);
}

Status CaptureStream::make(const Driver& driver, std::unique_ptr<CaptureStream>* made) {
  if (driver.graphs.create_stream == nullptr) return {Code::device, "[device] this CUDA driver has no graphs."};
  void* stream = nullptr;
  if (const int error = driver.graphs.create_stream(&stream, kStreamApart)) {
    return driver_failed(driver, "a stream", error);
  }
  made->reset(new CaptureStream(driver, stream));
  return {};
}

CaptureStream::~CaptureStream() { driver_.graphs.destroy_stream(stream_); }

Status CaptureStream::capture(const std::function<Status()>& work, std::unique_ptr<CapturedGraph>* graph) const {
  if (const int error = driver_.graphs.begin_capture(stream_, kCaptureRelaxed)) {
    return driver_failed(driver_, "a capture", error);
  }
  Status status = work();
  void* captured = nullptr;
  const int ended = driver_.graphs.end_capture(stream_, &captured);
  if (status.ok() && ended != 0) status = driver_failed(driver_, "a capture's end", ended);
  void* started = nullptr;
  if (status.ok()) {
    const int error = driver_.graphs.instantiate(&started, captured, 0);
    if (error != 0) status = driver_failed(driver_, "a captured graph", error);
  }
  if (!status.ok()) {
    if (captured != nullptr) driver_.graphs.destroy(captured);
    return status;
  }
  graph->reset(new CapturedGraph(driver_, captured, started));
  return {};
}

}  // namespace shoal
