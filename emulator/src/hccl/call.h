// The description of a call that a rank runs. The ranks compare their descriptions before they run
// the call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu::hccl {

constexpr size_t kDescriptionBytes = 112;

// Of these fields, only the text and the session are compared.
struct Call {
  char text[kDescriptionBytes];
  uint32_t session;  // the capture that is replayed; 0: the call is not part of a graph
  // With modelled time: the time at which this rank arrives, and how long the call takes after the
  // last rank has arrived.
  int64_t arrival_ns, cost_ns;
};

}  // namespace emu::hccl
