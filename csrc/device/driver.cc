#include "device/driver.h"

#include <dlfcn.h>

#include <string>

namespace shoal {

namespace {

static_assert(sizeof(KernelNode) == 72 && sizeof(FillNode) == 40 && sizeof(CopyNode) == 200);

template <typename Function>
bool look_up(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool look_up(void* library, GraphDriver* graphs) {
  return look_up(library, "cuStreamIsCapturing", &graphs->is_capturing) &&
         look_up(library, "cuStreamCreate", &graphs->create_stream) &&
         look_up(library, "cuStreamDestroy_v2", &graphs->destroy_stream) &&
         look_up(library, "cuStreamBeginCapture_v2", &graphs->begin_capture) &&
         look_up(library, "cuStreamEndCapture", &graphs->end_capture) &&
         look_up(library, "cuGraphCreate", &graphs->create) &&
         look_up(library, "cuGraphAddKernelNode_v2", &graphs->add_kernel) &&
         look_up(library, "cuGraphAddMemsetNode", &graphs->add_fill) &&
         look_up(library, "cuGraphAddMemcpyNode", &graphs->add_copy) &&
         look_up(library, "cuGraphAddEventRecordNode", &graphs->add_record) &&
         look_up(library, "cuGraphInstantiateWithFlags", &graphs->instantiate) &&
         look_up(library, "cuGraphExecKernelNodeSetParams_v2", &graphs->set_kernel) &&
         look_up(library, "cuGraphExecMemsetNodeSetParams", &graphs->set_fill) &&
         look_up(library, "cuGraphExecMemcpyNodeSetParams", &graphs->set_copy) &&
         look_up(library, "cuGraphExecEventRecordNodeSetEvent", &graphs->set_record) &&
         look_up(library, "cuGraphNodeSetEnabled", &graphs->set_enabled) &&
         look_up(library, "cuGraphLaunch", &graphs->launch) &&
         look_up(library, "cuGraphExecDestroy", &graphs->destroy_started) &&
         look_up(library, "cuGraphDestroy", &graphs->destroy);
}

}  // namespace

Status find_driver(Driver* driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {Code::device, "[device] wanted the CUDA driver, libcuda.so.1; there is none here."};
  if (!look_up(library, &driver->graphs)) driver->graphs = {};
  if (look_up(library, "cuCtxGetCurrent", &driver->context) &&
      look_up(library, "cuCtxSetCurrent", &driver->set_context) &&
      look_up(library, "cuLaunchKernel", &driver->launch) &&
      look_up(library, "cuMemsetD32Async", &driver->fill_words) &&
      look_up(library, "cuMemcpyDtoHAsync_v2", &driver->copy_to_host) &&
      look_up(library, "cuEventRecord", &driver->record) && look_up(library, "cuGetErrorString", &driver->describe)) {
    return {};
  }
  return {Code::device, "[device] libcuda.so.1 lacks a call that launches need. Update the CUDA driver."};
}

Status driver_failed(const Driver& driver, const char* what, int error) {
  const char* text = nullptr;
  driver.describe(error, &text);
  return {Code::device, "[device] the CUDA driver refused " + std::string(what) + ": " +
                            std::string(text ? text : "?") + " (" + std::to_string(error) +
                            "). An earlier kernel may have failed: try CUDA_LAUNCH_BLOCKING=1."};
}

}  // namespace shoal
