// Fault injection by the settings fault_*.
#pragma once

#include "emulator.h"

namespace emu {

// Returns the body, wrapped if the fault may happen at an execution of `name`.
Task with_fault(const char *name, int device, const LaunchTraits &traits, Task body);

// Before `name` is recorded into a graph: returns an error if it shall fail.
aclError fault_in_capture(const char *name, int device);

// Before the host calls `name`: returns an error if it shall fail. A stall of a call lasts its full
// time.
EMU_SHARED aclError fault_in_call(const char *name, int device);

// Before device memory is allocated: returns an error if it shall fail.
aclError fault_in_allocation(int device);

}  // namespace emu
