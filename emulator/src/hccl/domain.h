// The interface of a communicator for operators that communicate inside their kernel. Exported by
// libhccl.
#pragma once

#include "emulator.h"

#include <functional>
#include <optional>
#include <string>

namespace emu::hccl {

struct Domain {
  uint32_t ranks, rank;
  uint32_t buffer_mb;      // size of HCCL's buffer for this communicator
  // the communicator runs collectives, which write to the same windows
  bool has_collectives;
  // Tasks call this function. Every rank offers the same number of bytes. `consume(begin, size,
  // parts)` is called for successive ranges of these bytes, each time with the range of all ranks.
  // The ranks compare `what`.
  using Consume = std::function<void(size_t begin, size_t size, const char *const *parts)>;
  std::function<void(const std::string &what, const char *offer, size_t bytes, Consume)> exchange;
};

// Finds a communicator by the name that HcclGetCommName returns; null if this process has no such
// rank. From then on the communicator is for operators that communicate inside their kernel:
// collectives are refused.
EMU_SHARED std::optional<Domain> find_domain(const std::string &name, uint32_t rank);

// The value of HCCL_BUFFSIZE, or HCCL's default.
EMU_SHARED uint32_t hccl_buffsize_mb();

}  // namespace emu::hccl
