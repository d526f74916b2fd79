// Functions that all emulated libraries use: to launch work, to convert device addresses, and to
// report errors. They are no part of CANN.
#pragma once

#include <acl/acl_base.h>
#include <acl/acl_rt.h>

#include "settings.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#define EMU_SHARED __attribute__((visibility("default")))
#define EMU_API extern "C" EMU_SHARED

namespace emu {

using Task = std::function<void()>;

// The kind of a task. Tasks of the kind Kernel are the only tasks that a task group may update.
enum class TaskKind {
  Kernel,
  Copy,
  HostCallback,
  EventRecord,   // edge inside one graph
  EventWait,     // edge inside one graph
  ExternalTask,  // external event, or value wait or write; ordered with work outside the graph
  GraphLaunch
};

struct LaunchTraits {
  // Two fields for the counters. A field contains the operator's name if its counter counts this
  // launch; otherwise null.
  const char *ai_cpu = nullptr;     // the AI CPU runs it
  const char *unaligned = nullptr;  // a tensor does not begin at a multiple of 32 bytes
  // The next two fields are used with modelled time only.
  int64_t ns = 0;                   // time of the launch on the chip
  bool between_host_and_device = false;  // a copy that uses no core
  // Addresses of the operator's tensors, in the order of its arguments; null if `wants_operands` is
  // false for the operator.
  std::shared_ptr<const std::vector<uintptr_t>> operands;
};

// Whether the settings contain a fault that damages the memory of this operator's tensors. If so, a
// launch must set `operands`.
EMU_SHARED bool wants_operands(const char *name);

// Runs `body` on the device. Usually, the task is queued for the stream's worker thread. If the
// stream is being captured, the task is appended to the graph. In a task-update section, the task
// replaces the body of the next task of the task group.
EMU_SHARED aclError launch(aclrtStream stream, TaskKind kind, const char *name, Task body,
                           LaunchTraits traits = {});

// Sets the text that aclGetRecentErrMsg returns to this thread, and returns `code`. In the thread
// of torch_npu's task queue, the device stops with this text instead, and the call succeeds.
EMU_SHARED aclError fail(aclError code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

constexpr aclError kNotEmulated = 161003;  // of calls that the emulator refuses

// Device addresses are in a range of addresses that is mapped with PROT_NONE. Kernels use a second
// mapping of the same pages. So host code that dereferences a device pointer crashes, as with a
// real device.
constexpr int kMaxDevices = 64;
constexpr uintptr_t kDeviceWindow = 0x200000000000ull;
constexpr uintptr_t kDeviceWindowBytes = 0x100000000000ull;

inline bool is_device_address(const void *p) {
  return reinterpret_cast<uintptr_t>(p) - kDeviceWindow < kDeviceWindowBytes;
}

// The address at which the emulator itself may read and write the memory at `p`.
template <class T> inline T *accessible(T *p) {
  if (!is_device_address(p))
    return p;
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(p) + kDeviceWindowBytes);
}

}  // namespace emu
