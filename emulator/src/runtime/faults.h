// Faults that the settings fault_* inject.
#pragma once

#include "emulator.h"

#include <string>

namespace emu {

// Returns the body of a task. If a fault may happen when `name` is executed, the body is wrapped so
// that the fault can happen.
Task with_fault(const char *name, int device, const LaunchTraits &traits, Task body);

// To be called before `name` is recorded into a graph. Returns an error if a fault makes the
// recording fail.
aclError fault_in_capture(const char *name, int device);

// To be called before the host calls `name`. Returns an error if a fault makes the call fail. If a
// fault makes the call stall, this function waits for the full time of the stall.
EMU_SHARED aclError fault_in_call(const char *name, int device);

// Like fault_in_call, but for a call that reports errors as text. Returns the text of the fault, or
// "". A stall ends as soon as `is_over` returns true.
EMU_SHARED std::string planted_fault(const char *name, int device,
                                     const std::function<bool()> &is_over);

// To be called before device memory is allocated. Returns an error if a fault makes the allocation
// fail.
aclError fault_in_allocation(int device);

}  // namespace emu
