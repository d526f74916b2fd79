#include "runtime/errors.h"

#include "runtime/services.h"

#include <cstdarg>
#include <cstdio>

namespace emu {

DeviceFailure g_failures[kMaxDevices];

static thread_local std::string t_error;

aclError fail(aclError code, const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  t_error = std::string("[emulated CANN] ") + text;
  if (settings().trace)
    fprintf(stderr, "[emulator] error %d: %s\n", code, text);
  return code;
}

void DeviceFailure::set(aclError new_code, std::string text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (code)
    return;
  message = std::move(text);
  code = new_code;
}

aclError DeviceFailure::report() {
  if (!code)
    return 0;
  std::lock_guard<std::mutex> lock(mutex);
  return fail(code, "%s", message.c_str());
}

bool device_failed() { return t_device >= 0 && g_failures[t_device].code != 0; }

}  // namespace emu

EMU_API const char *aclGetRecentErrMsg() {
  static thread_local std::string returned;
  returned.swap(emu::t_error);
  emu::t_error.clear();
  return returned.empty() ? nullptr : returned.c_str();
}
EMU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return 0; }
EMU_API aclError aclrtGetLastError(aclrtLastErrLevel) { return 0; }
