// Memory with errors that the hardware can find and not correct (UCE). A page turns bad by a fault
// of the settings; whatever reads or writes it from then on fails, until it is repaired.
#pragma once

#include "emulator.h"

#include <vector>

namespace emu {

// Whether a fault of the settings may ever turn memory bad: only then is anything watched.
bool may_turn_bad();

// The page of a device's memory in which `address` lies; nobody knows before somebody touches it.
void turn_bad(int device, uintptr_t address);
// The same for memory that no program has: a library's own. The calling task has touched it.
void turn_library_memory_bad(int device);

// The body; it throws behind it if it has touched bad memory.
Task watched(Task body);
// Throws the same as soon as is known: before what was read goes to others.
EMU_SHARED void check_memory();
// For calls of the host that touch memory themselves: 0, or the code with which the device stops.
aclError check_memory_of_call(const char *call);

// Memory that is given back or unmapped takes its errors along.
void release_bad_memory(uintptr_t address, size_t bytes);

// What CANN tells: addresses that were touched. It keeps what it has told until the next repair.
std::vector<aclrtMemUceInfo> told_bad_memory(int device);
aclError repair_memory(int device, const aclrtMemUceInfo *ranges, size_t count);

}  // namespace emu
