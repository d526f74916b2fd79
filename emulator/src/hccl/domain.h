// The interface through which operators that communicate inside their kernel use a communicator.
// Exported by libhccl.
#pragma once

#include "emulator.h"

#include <functional>
#include <optional>
#include <string>

namespace emu::hccl {

struct Domain {
  uint32_t ranks, rank;
  uint32_t buffer_mb;      // size of HCCL's buffer for this communicator
  // collectives use the communicator; they write to the same windows
  bool has_collectives;
  // Called by tasks. Every rank offers the same number of bytes. `consume(begin, size, parts)` is
  // called for one range of these bytes after the other; `parts` are the bytes of all ranks in this
  // range. The ranks compare `what`, which describes the call.
  using Consume = std::function<void(size_t begin, size_t size, const char *const *parts)>;
  std::function<void(const std::string &what, const char *offer, size_t bytes, Consume)> exchange;
};

// Finds a communicator by the name that HcclGetCommName returns. Returns null if this process has
// no such rank. From this call on, only operators that communicate inside their kernel may use the
// communicator, and collectives are refused.
EMU_SHARED std::optional<Domain> find_domain(const std::string &name, uint32_t rank);

// The value of HCCL_BUFFSIZE, or HCCL's default.
EMU_SHARED uint32_t hccl_buffsize_mb();

}  // namespace emu::hccl
