// The description of the call that a rank runs. Ranks compare their descriptions before they run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu::hccl {

constexpr size_t kDescriptionBytes = 112;

// Only the text and the session are compared.
struct Call {
  char text[kDescriptionBytes];
  uint32_t session;  // the capture that is replayed; 0: the call is not part of a graph
  // With modelled time: the time at which this rank arrives, and the duration of the call after the
  // latest rank's arrival.
  int64_t arrival_ns, cost_ns;
};

}  // namespace emu::hccl
