#include "runtime/errors.h"

#include "runtime/services.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <thread>

namespace emu {

DeviceFailure g_failures[kMaxDevices];

static thread_local std::string t_error;
static std::atomic<int> g_fault_identity{-1};
static std::atomic<long> g_fault_calls{0};

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

void set_fault_identity(int rank) {
  int none = -1;
  g_fault_identity.compare_exchange_strong(none, rank);
}

static void stall() {
  using Clock = std::chrono::steady_clock;
  auto end = Clock::now() + std::chrono::duration<double>(settings().stall_s);
  while (Clock::now() < end && !device_failed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

Task with_fault(const char *name, int device, Task body) {
  const Settings &s = settings();
  if (s.fault_op.empty() || s.fault_op != name)
    return body;
  return [body = std::move(body), name, device] {
    const Settings &s = settings();
    int identity = g_fault_identity >= 0 ? g_fault_identity.load() : device;
    bool mine = s.fault_rank < 0 || s.fault_rank == identity;
    if (mine && ++g_fault_calls == s.fault_call) {
      if (s.fault_kind == FaultKind::Fail)
        throw std::runtime_error("injected fault in call " + std::to_string(s.fault_call) + " of " +
                                 name);
      stall();
    }
    body();
  };
}

}  // namespace emu

EMU_API const char *aclGetRecentErrMsg() {
  static thread_local std::string returned;
  returned.swap(emu::t_error);
  emu::t_error.clear();
  return returned.empty() ? nullptr : returned.c_str();
}
EMU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return 0; }
EMU_API aclError aclrtGetLastError(aclrtLastErrLevel) { return 0; }
