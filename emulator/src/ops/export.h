// Exports a function under a C name, without a declaration of its parameters. Usually, an exported
// function is declared with its parameters. But the parameters of an operator are derived from its
// lambda, so no declaration can name them. Therefore the exported symbol is an indirect function
// (ifunc), which has no code of its own: the dynamic linker gives each caller the address that the
// symbol's resolver returns. So a call jumps directly to the function, and this code does not
// depend on how a processor passes arguments. Ifuncs are a feature of ELF, GCC and glibc, and exist
// on x86-64, aarch64 and other processors.
#pragma once

#include "emulator.h"

#define EMU_EXPORT(SYMBOL, FUNCTION)                                                               \
  extern "C" {                                                                                     \
  __attribute__((visibility("hidden"), used)) int (*emu_resolve_##SYMBOL())() {                    \
    return reinterpret_cast<int (*)()>(FUNCTION);                                                  \
  }                                                                                                \
  EMU_SHARED int SYMBOL() __attribute__((ifunc("emu_resolve_" #SYMBOL)));                          \
  }
