// Errors of calls, and of devices that a failed kernel stopped.
#pragma once

#include "emulator.h"

#include <atomic>
#include <mutex>
#include <string>

namespace emu {

// A kernel error stops the whole device: later launches, waits and synchronizes report it.
struct DeviceFailure {
  std::atomic<aclError> code{0};
  std::mutex mutex;
  std::string message;

  bool set(aclError new_code, std::string text);  // false: there is an earlier error, which stays
  aclError report();                              // 0, or the code with the message set
};
extern DeviceFailure g_failures[kMaxDevices];

void stop_device(int device, aclError code, const std::string &text);

// Whether this is the thread of torch_npu's task queue. It gives up at the first error and skips
// later work without a word, so there no call fails: the device stops instead, and says why.
bool in_task_queue();

// Which device the thread works on; -1 before aclrtSetDevice.
inline thread_local int t_device = -1;
inline int current_device() { return t_device < 0 ? 0 : t_device; }

}  // namespace emu
