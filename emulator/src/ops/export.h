// Exports a function under a C name without a second declaration of its type. An exported function
// is usually declared with its parameters. But an operator's parameters are derived from its
// lambda, so no declaration can name them. Therefore the export is an indirect function (ifunc), a
// symbol without code: the dynamic linker gives a caller the address that the symbol's resolver
// returns. A call jumps directly to the function, so this code does not depend on how a processor
// passes arguments. Ifuncs are a feature of ELF, GCC and glibc, on x86-64, aarch64 and other
// processors.
#pragma once

#include "emulator.h"

#define EMU_EXPORT(SYMBOL, FUNCTION)                                                               \
  extern "C" {                                                                                     \
  __attribute__((visibility("hidden"), used)) int (*emu_resolve_##SYMBOL())() {                    \
    return reinterpret_cast<int (*)()>(FUNCTION);                                                  \
  }                                                                                                \
  EMU_SHARED int SYMBOL() __attribute__((ifunc("emu_resolve_" #SYMBOL)));                          \
  }
