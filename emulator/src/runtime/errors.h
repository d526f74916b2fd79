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

  void set(aclError new_code, std::string text);  // keeps the first error
  aclError report();                              // 0, or the code with the message set
};
extern DeviceFailure g_failures[kMaxDevices];

// Which device the thread works on; -1 before aclrtSetDevice.
inline thread_local int t_device = -1;
inline int current_device() { return t_device < 0 ? 0 : t_device; }

}  // namespace emu
