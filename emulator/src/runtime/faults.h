// Fault injection by the settings fault_*.
#pragma once

#include "emulator.h"

#include <string>

namespace emu {

// Returns the body, wrapped if the fault may happen at an execution of `name`.
Task with_fault(const char *name, int device, const LaunchTraits &traits, Task body);

// Call this before `name` is recorded into a graph. Returns an error if the recording shall fail.
aclError fault_in_capture(const char *name, int device);

// Call this before the host calls `name`. Returns an error if the call shall fail. If the call
// shall stall, it stalls for the full time.
EMU_SHARED aclError fault_in_call(const char *name, int device);

// The same for a call that reports errors in its own way: returns the text of the fault, or "". A
// stall ends as soon as `is_over`.
EMU_SHARED std::string planted_fault(const char *name, int device,
                                     const std::function<bool()> &is_over);

// Call this before device memory is allocated. Returns an error if the allocation shall fail.
aclError fault_in_allocation(int device);

}  // namespace emu
