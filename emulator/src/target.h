// The chip and the CANN release of the settings. Checks that depend on them use these functions.
#pragma once

#include "settings.h"

#include <array>
#include <cstdio>

namespace emu {

// Atlas A2 and A3 are the generations of chips whose documents and sources the checks follow.
enum class Chip { A2, A3, Other };

inline Chip chip() {
  const std::string &name = settings().soc;
  if (name.rfind("Ascend910_93", 0) == 0)
    return Chip::A3;
  return name.rfind("Ascend910B", 0) == 0 ? Chip::A2 : Chip::Other;
}

// Whether the CANN of the settings is older than this release. The releases whose rules differ,
// with the dates of their operators' sources: 8.5.0 (November 2025), 8.5.1 (December 2025), 9.0
// (2026), 9.1 (August 2026). If no source describes the behaviour of 8.5.1, the emulator uses the
// rules of 8.5.0, which are stricter.
inline bool cann_before(int major, int minor = 0, int patch = 0) {
  static const std::array<int, 3> found = [] {
    std::array<int, 3> numbers{};
    std::sscanf(settings().cann.c_str(), "%d.%d.%d", &numbers[0], &numbers[1], &numbers[2]);
    return numbers;
  }();
  return found < std::array<int, 3>{major, minor, patch};
}

}  // namespace emu
