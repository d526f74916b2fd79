#include "runtime/window.h"

#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emu {

constexpr uintptr_t kGranule = 2u << 20;
constexpr size_t kPoisonEnd = 8u << 20;

static void *at(uintptr_t address) { return reinterpret_cast<void *>(address); }

uintptr_t reserve_window(size_t bytes) {
  static std::atomic<uintptr_t> next{kDeviceWindow};
  uintptr_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
  return next.fetch_add(rounded + kGranule);  // a gap after each range detects overruns
}

int new_memory_file(size_t bytes) {
  int file = static_cast<int>(syscall(SYS_memfd_create, "npu", 0));
  if (file >= 0 && ftruncate(file, bytes)) {
    close(file);
    return -1;
  }
  return file;
}

bool map_new_window(uintptr_t address, size_t bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  return mmap(at(address), bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED &&
         mmap(accessible(at(address)), bytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
}

bool map_window(uintptr_t address, size_t bytes, int file, size_t offset) {
  constexpr int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  return mmap(at(address), bytes, PROT_NONE, flags, file, offset) != MAP_FAILED &&
         mmap(accessible(at(address)), bytes, PROT_READ | PROT_WRITE, flags, file, offset) !=
             MAP_FAILED;
}

void hide_window(uintptr_t address, size_t bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  mmap(at(address), bytes, PROT_NONE, flags, -1, 0);
  mmap(accessible(at(address)), bytes, PROT_NONE, flags, -1, 0);
}

void unmap_window(uintptr_t address, size_t bytes) {
  munmap(at(address), bytes);
  munmap(accessible(at(address)), bytes);
}

// Mapping all pages at once costs a third less than one page fault for each page. If the system
// cannot map them at once, they are mapped later by page faults.
static void have_pages(char *p, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  madvise(p, bytes, MADV_POPULATE_WRITE);
#endif
}

void poison(uintptr_t address, size_t bytes) {
  if (!settings().compute)
    return;  // without arithmetic, memory stays zero, because zeros are valid indices
  if (bytes > kPoisonWhole)
    return poison_ends(address, bytes, kPoisonEnd);
  auto *p = static_cast<char *>(accessible(at(address)));
  have_pages(p, bytes);
  memset(p, 0xFF, bytes);
}

void poison_ends(uintptr_t address, size_t bytes, size_t end_bytes) {
  if (!settings().compute)
    return;
  auto *p = static_cast<char *>(accessible(at(address)));
  end_bytes = std::min(end_bytes, bytes);
  memset(p, 0xFF, end_bytes);
  memset(p + bytes - end_bytes, 0xFF, end_bytes);
}

}  // namespace emu
