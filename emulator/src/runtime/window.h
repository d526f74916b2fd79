// The device window: device memory is mapped twice. The program sees the first address, but cannot
// access the memory there. Kernels use the second address, the alias. New memory is poisoned: it is
// filled with bytes 0xFF (NaN or -1), so that a read before the first write has a visible effect.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

uintptr_t reserve_window(size_t bytes);  // reserves an address range, which is never used twice
int new_memory_file(size_t bytes);       // -1 on failure

// Maps new memory of this size at `address` and at its alias. Returns false if Linux refuses.
bool map_new_window(uintptr_t address, size_t bytes);
// Maps a part of `file` at `address` and at its alias. Returns false if Linux refuses.
bool map_window(uintptr_t address, size_t bytes, int file, size_t offset);
void hide_window(uintptr_t address, size_t bytes);   // keeps the range reserved
void unmap_window(uintptr_t address, size_t bytes);  // both mappings

// Larger allocations are poisoned only at their two ends, because poisoned pages use real memory.
constexpr size_t kPoisonWhole = 256u << 20;

void poison(uintptr_t address, size_t bytes);
void poison_ends(uintptr_t address, size_t bytes, size_t end_bytes);

}  // namespace emu
