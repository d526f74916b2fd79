// Fault injection: what the settings fault_* ask for.
#pragma once

#include "emulator.h"

namespace emu {

// The body, wrapped if the fault is for an execution of `name`.
Task with_fault(const char *name, int device, const LaunchTraits &traits, Task body);

// `name` is about to be recorded into a graph: an error if it shall fail.
aclError fault_in_capture(const char *name, int device);

// The host calls `name`: an error if it shall fail. A call that stalls does so in full.
EMU_SHARED aclError fault_in_call(const char *name, int device);

// Device memory is about to be allocated: an error if it shall fail.
aclError fault_in_allocation(int device);

}  // namespace emu
