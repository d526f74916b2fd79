// Lets a thread wait for another thread without sleeping.
#pragma once

#include <thread>

namespace emu {

// One turn of a loop that waits. It takes some ten nanoseconds, in which other hardware threads of
// the core can work.
inline void spin_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` does nothing on most of these cores
#else
  std::this_thread::yield();
#endif
}

}  // namespace emu
