// What a rank runs, for comparison and messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu::hccl {

constexpr size_t kDescriptionBytes = 112;

struct Call {
  char text[kDescriptionBytes];
  uint32_t session;  // the capture that is replayed; 0: the call is not part of a graph
};

}  // namespace emu::hccl
