// The errors of calls, and of devices that a failed kernel has stopped.
#pragma once

#include "emulator.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace emu {

// An error of a kernel stops the whole device. Later launches, waits and synchronizes report the
// error, until the device's work is aborted.
struct DeviceFailure {
  std::atomic<aclError> code{0};
  std::atomic<uint32_t> aborts{0};  // number of aborts; an abort makes running waits fail
  std::mutex mutex;
  std::string message;

  bool set(aclError new_code, std::string text);  // false: there is an earlier error, which is kept
  aclError report();                              // 0, or the code with the message set
  // To be called at the end of a wait. Returns an error if the device has failed, or if work was
  // aborted during the wait. `aborts_before` is the number of aborts when the wait began.
  aclError report_since(uint32_t aborts_before);

  void begin_abort();  // replaces any existing error
  void end_abort();    // the device works again
};
extern DeviceFailure g_failures[kMaxDevices];

// Thrown by a task to stop the device with `code`, instead of the error code of a failed kernel.
class TaskError : public std::runtime_error {
public:
  const aclError code;
  TaskError(aclError code_, const std::string &text) : std::runtime_error(text), code(code_) {}
};
aclError code_of(const std::exception &e);

void stop_device(int device, aclError code, const std::string &text);

// Whether the calling thread is the thread of torch_npu's task queue. That thread stops at the
// first error, and silently skips all later work. So no call fails in that thread: instead, the
// device stops, and reports the reason.
bool in_task_queue();

// The device of the thread; -1 before aclrtSetDevice.
inline thread_local int t_device = -1;
inline int current_device() { return t_device < 0 ? 0 : t_device; }

}  // namespace emu
