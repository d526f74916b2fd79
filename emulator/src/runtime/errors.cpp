#include "runtime/errors.h"

#include "runtime/services.h"

#include <acl/error_codes/rt_error_codes.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include <pthread.h>

namespace emu {

DeviceFailure g_failures[kMaxDevices];

static thread_local std::string t_error;
static thread_local aclError t_last_error = 0;  // the runtime's error, until it is read

// Codes of the runtime are 107xxx, 207xxx and 507xxx.
static bool is_of_runtime(aclError code) { return code / 1000 % 100 == 7; }

aclError fail(aclError code, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  t_error = std::string("[emulated CANN] ") + text;
  if (is_of_runtime(code))
    t_last_error = code;
  if (settings().trace)
    fprintf(stderr, "[emulator] error %d: %s\n", code, text);
  // If an abort has ended a call, this does not count as a failure of the call.
  if (!in_task_queue() || code == ACL_ERROR_RT_DEVICE_TASK_ABORT)
    return code;
  stop_device(current_device(), code, text);
  return 0;
}

// torch_npu gives a certain name to the thread that launches the calls of its task queue.
bool in_task_queue() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return strcmp(name, "acl_thread") == 0;
}

void stop_device(int device, aclError code, const std::string &text) {
  if (g_failures[device].set(code, text))
    fprintf(stderr, "[emulator] device %d stops: %s\n", device, text.c_str());
}

bool DeviceFailure::set(aclError new_code, std::string text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (code)
    return false;
  message = std::move(text);
  code = new_code;
  return true;
}

aclError DeviceFailure::report() {
  if (!code)
    return 0;
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    text = message;
  }
  return fail(code, "%s", text.c_str());
}

aclError DeviceFailure::report_since(uint32_t aborts_before) {
  if (aborts == aborts_before)
    return report();
  return fail(ACL_ERROR_RT_DEVICE_TASK_ABORT, "reason=[device task abort]: what was waited for is gone");
}

void DeviceFailure::begin_abort() {
  std::lock_guard<std::mutex> lock(mutex);
  message = "reason=[device task abort]: the device is stopped";
  aborts++;
  code = ACL_ERROR_RT_DEVICE_TASK_ABORT;
}

void DeviceFailure::end_abort() { code = 0; }

aclError code_of(const std::exception &e) {
  auto *error = dynamic_cast<const TaskError *>(&e);
  return error ? error->code : ACL_ERROR_RT_AICORE_EXCEPTION;
}

uint32_t num_aborts() { return g_failures[current_device()].aborts; }
bool device_failed() { return t_device >= 0 && g_failures[t_device].code != 0; }

}  // namespace emu

EMU_API const char *aclGetRecentErrMsg() {
  static thread_local std::string returned;
  returned.swap(emu::t_error);
  emu::t_error.clear();
  return returned.empty() ? nullptr : returned.c_str();
}
// torch_npu queries this error if a library that uses the runtime fails, because the library's own
// error may not say why. HCCL, for example, only reports that "a call of the runtime has failed".
EMU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return emu::t_last_error; }
EMU_API aclError aclrtGetLastError(aclrtLastErrLevel) { return std::exchange(emu::t_last_error, 0); }
