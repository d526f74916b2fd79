// The chip and the CANN release that the settings name. Checks that depend on the chip or the
// release use these functions.
#pragma once

#include "settings.h"

#include <array>
#include <cstdio>

namespace emu {

// Atlas A2 and A3 are generations of chips. The emulator's checks follow the documents and sources
// for these two.
enum class Chip { A2, A3, Other };

inline Chip chip() {
  const std::string &name = settings().soc;
  if (name.rfind("Ascend910_93", 0) == 0)
    return Chip::A3;
  return name.rfind("Ascend910B", 0) == 0 ? Chip::A2 : Chip::Other;
}

// Whether the CANN release that the settings name is older than this release. The rules differ
// between the releases 8.5.0 (operators' sources of November 2025), 8.5.1 (December 2025), 9.0
// (2026) and 9.1 (August 2026). If no source describes the behaviour of 8.5.1, the emulator uses
// the rules of 8.5.0, which are stricter.
inline bool cann_before(int major, int minor = 0, int patch = 0) {
  static const std::array<int, 3> found = [] {
    std::array<int, 3> numbers{};
    std::sscanf(settings().cann.c_str(), "%d.%d.%d", &numbers[0], &numbers[1], &numbers[2]);
    return numbers;
  }();
  return found < std::array<int, 3>{major, minor, patch};
}

}  // namespace emu
