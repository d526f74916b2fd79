// What a rank runs, for comparison and messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu::hccl {

constexpr size_t kDescriptionBytes = 112;

// Only the text and the session are compared.
struct Call {
  char text[kDescriptionBytes];
  uint32_t session;  // the capture that is replayed; 0: the call is not part of a graph
  // With modelled time: when this rank has come, and what it takes from the arrival of the latest.
  int64_t arrival_ns, cost_ns;
};

}  // namespace emu::hccl
