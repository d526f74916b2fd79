// The chip and the CANN release of the settings. Checks that differ by them use these functions.
#pragma once

#include "settings.h"

namespace emu {

// Atlas A2 and A3: the generations whose documents and sources the checks follow.
enum class Chip { A2, A3, Other };

inline Chip chip() {
  const std::string &name = settings().soc;
  if (name.rfind("Ascend910_93", 0) == 0)
    return Chip::A3;
  return name.rfind("Ascend910B", 0) == 0 ? Chip::A2 : Chip::Other;
}

// 8.5 is the line of November 2025, 9 those of 2026.
enum class CannLine { V8_5, V9 };

inline CannLine cann_line() {
  return settings().cann.rfind("8.", 0) == 0 ? CannLine::V8_5 : CannLine::V9;
}
inline bool is_cann_8_5() { return cann_line() == CannLine::V8_5; }

}  // namespace emu
