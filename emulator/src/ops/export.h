// Exports a function under a C name without saying its type again.
//
// An exported function is declared with its parameters, and those of an operator are derived from
// its lambda: no declaration could name them. So the export is an indirect function (ifunc), a
// symbol without code: who looks it up gets from the dynamic linker the address that the symbol's
// resolver returns. A call goes straight to the function, so that nothing here knows how a processor
// passes arguments. Of ELF, GCC and glibc, on x86-64 and aarch64 among others.
#pragma once

#include "emulator.h"

#define EMU_EXPORT(SYMBOL, FUNCTION)                                                               \
  extern "C" {                                                                                     \
  __attribute__((visibility("hidden"), used)) int (*emu_resolve_##SYMBOL())() {                    \
    return reinterpret_cast<int (*)()>(FUNCTION);                                                  \
  }                                                                                                \
  EMU_SHARED int SYMBOL() __attribute__((ifunc("emu_resolve_" #SYMBOL)));                          \
  }
