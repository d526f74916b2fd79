// Aborts the work of a device, and reports memory errors as CANN does (13_exception_handling.md in
// the runtime's documents). The steps of an abort have the same order as in
// ContextManage::DeviceTaskAbort.
#include "runtime/bad_memory.h"
#include "runtime/faults.h"
#include "runtime/objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstring>

using namespace emu;

namespace {

struct Listener {
  aclrtDeviceTaskAbortCallback callback;
  void *argument;
};
std::mutex g_listeners_mutex;
std::map<std::string, Listener> g_listeners;

std::mutex g_abort_mutex;  // one abort at a time

aclError tell_listeners(int device, aclrtDeviceTaskAbortStage stage, uint32_t timeout_ms) {
  Lock lock(g_listeners_mutex);
  for (auto &[name, listener] : g_listeners)
    if (listener.callback(device, stage, timeout_ms, listener.argument))
      return fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s did not follow the abort of device %d",
                  name.c_str(), device);
  return 0;
}

// Waits until no task runs. This does not take long: because the device has failed, workers skip
// queued tasks, and running tasks end early.
bool wait_until_drained(int device, uint32_t timeout_ms) {
  auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (Stream *stream : streams_of(device))
    while (!stream->drained()) {
      if (timeout_ms && Clock::now() > end)
        return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  return true;
}

bool is_device(int32_t device) { return device >= 0 && device < kMaxDevices; }

aclError refuse_device(int32_t device) {
  return fail(ACL_ERROR_RT_INVALID_DEVICEID, "invalid device %d", device);
}

}  // namespace

// Memory, handles and graphs stay valid. Queued work is removed. If the record of an event is
// removed, the event counts as complete. If the abort fails, the device stays stopped.
EMU_API aclError aclrtDeviceTaskAbort(int32_t device, uint32_t timeout_ms) {
  if (!is_device(device))
    return refuse_device(device);
  Lock one(g_abort_mutex);
  DeviceFailure &failure = g_failures[device];
  failure.begin_abort();
  if (aclError e = fault_in_call("aclrtDeviceTaskAbort", device))
    return e;
  if (aclError e = tell_listeners(device, ACL_RT_DEVICE_TASK_ABORT_PRE, timeout_ms))
    return e;
  if (!wait_until_drained(device, timeout_ms))
    return fail(ACL_ERROR_RT_WAIT_TIMEOUT, "the tasks of device %d did not end within %u ms",
                device, timeout_ms);
  if (aclError e = tell_listeners(device, ACL_RT_DEVICE_TASK_ABORT_POST, timeout_ms))
    return e;
  for (Stream *stream : streams_of(device))
    stream->cut(now_ns());
  failure.end_abort();
  return 0;
}

EMU_API aclError aclrtSetDeviceTaskAbortCallback(const char *name,
                                                 aclrtDeviceTaskAbortCallback callback,
                                                 void *argument) {
  Lock lock(g_listeners_mutex);
  if (!callback)
    g_listeners.erase(name);
  else if (!g_listeners.try_emplace(name, Listener{callback, argument}).second)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s has a callback for aborts already", name);
  return 0;
}

EMU_API aclError aclrtGetMemUceInfo(int32_t device, aclrtMemUceInfo *ranges, size_t room,
                                    size_t *count) {
  if (!is_device(device))
    return refuse_device(device);
  const auto bad = told_bad_memory(device);
  if (bad.size() > room)
    return fail(ACL_ERROR_INVALID_PARAM, "%zu faulty addresses, room for %zu", bad.size(), room);
  std::copy(bad.begin(), bad.end(), ranges);
  *count = bad.size();
  return 0;
}
EMU_API aclError aclrtMemUceRepair(int32_t device, aclrtMemUceInfo *ranges, size_t count) {
  static const aclrtMemUceInfo blank{};
  if (!is_device(device))
    return refuse_device(device);
  for (size_t i = 0; i < count; i++)
    if (memcmp(ranges[i].reserved, blank.reserved, sizeof blank.reserved))
      return fail(ACL_ERROR_INVALID_PARAM, "what is reserved of address %zu to repair is not 0", i);
  return repair_memory(device, ranges, count);
}

// On A2 and A3, there are three answers: a memory error, another error, or no error
// (ApiImpl::GetErrorVerbose). torch_npu makes this query only on Ascend950 and later chips.
EMU_API aclError aclrtGetErrorVerbose(int32_t device, aclrtErrorInfo *info) {
  if (!is_device(device))
    return refuse_device(device);
  memset(info, 0, sizeof *info);
  const auto bad = told_bad_memory(device);
  aclError code = g_failures[device].code;
  if (!bad.empty()) {
    info->errorType = ACL_RT_ERROR_MEMORY;
    info->tryRepair = info->hasDetail = 1;
    info->detail.uceInfo.arraySize = bad.size();
    std::copy(bad.begin(), bad.end(), info->detail.uceInfo.memUceInfoArray);
  } else if (code == ACL_ERROR_RT_LINK_ERROR || code == ACL_ERROR_RT_SUSPECT_REMOTE_ERROR) {
    info->errorType = ACL_RT_ERROR_OTHERS;
  }
  return 0;
}
EMU_API aclError aclrtRepairError(int32_t device, const aclrtErrorInfo *info) {
  if (!is_device(device))
    return refuse_device(device);
  if (!info->tryRepair)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "an error that shall not be repaired");
  switch (info->errorType) {
  case ACL_RT_NO_ERROR:
    return 0;
  case ACL_RT_ERROR_MEMORY:
    return repair_memory(device, info->detail.uceInfo.memUceInfoArray,
                         info->detail.uceInfo.arraySize);
  default:
    return fail(ACL_ERROR_RT_PARAM_INVALID, "errors of type %d are not repaired", info->errorType);
  }
}
