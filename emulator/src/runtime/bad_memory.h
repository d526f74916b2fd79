// Memory with errors that the hardware finds and cannot correct (UCE). A fault of the settings
// makes a page bad; afterwards every access to this page fails, until the page is repaired.
#pragma once

#include "emulator.h"

#include <vector>

namespace emu {

// Whether a fault of the settings may make memory bad: only then accesses are watched.
bool may_turn_bad();

// Makes the page that contains `address` bad. The next access notices this.
void turn_bad(int device, uintptr_t address);
// Does the same for memory of a library, which no program can address. The calling task counts as
// having accessed this memory.
void turn_library_memory_bad(int device);

// Wraps the body of a task. The wrapped body throws at its end if the task has accessed bad memory.
Task watched(Task body);
// Throws the same error at once if the task has accessed bad memory. Call this before data that was
// read is sent to other ranks.
EMU_SHARED void check_memory();
// For calls of the host that access memory themselves. Returns 0, or the code with which the device
// stops.
aclError check_memory_of_call(const char *call);

// Memory that is freed or unmapped loses its errors.
void release_bad_memory(uintptr_t address, size_t bytes);

// CANN's list: accessed bad addresses. The list is kept until the next repair.
std::vector<aclrtMemUceInfo> told_bad_memory(int device);
aclError repair_memory(int device, const aclrtMemUceInfo *ranges, size_t count);

}  // namespace emu
