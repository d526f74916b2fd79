// Memory with errors that the hardware finds but cannot correct (UCE). A fault in the settings
// makes a page bad. From then on, every task that accesses this page fails, until the page is
// repaired.
#pragma once

#include "emulator.h"

#include <vector>

namespace emu {

// Whether the settings contain a fault that makes memory bad. If not, accesses to memory are not
// watched.
bool may_turn_bad();

// Makes the page that contains `address` bad. The next access to this page is noticed.
void turn_bad(int device, uintptr_t address);
// Makes memory bad that belongs to a library. No program can address this memory. The calling task
// counts as a task that has accessed this memory.
void turn_library_memory_bad(int device);

// Wraps the body of a task. If the task has accessed bad memory, the wrapped body throws when it
// ends.
Task watched(Task body);
// If the task has already accessed bad memory, throws the same error as the wrapped body, but at
// once. To be called before a task sends data to other ranks, because this data may come from bad
// memory.
EMU_SHARED void check_memory();
// Checks whether a call of the host has accessed bad memory. Such a call accesses memory without a
// task. Returns 0, or the error code with which the device stops.
aclError check_memory_of_call(const char *call);

// To be called when memory is freed or unmapped: its pages are no longer bad.
void release_bad_memory(uintptr_t address, size_t bytes);

// Returns the list that CANN reports: the bad addresses that were accessed. The list grows until
// the next repair.
std::vector<aclrtMemUceInfo> told_bad_memory(int device);
aclError repair_memory(int device, const aclrtMemUceInfo *ranges, size_t count);

}  // namespace emu
