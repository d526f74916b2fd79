// What operators that communicate inside their kernel need of a communicator. Exported by libhccl.
#pragma once

#include "emulator.h"

#include <functional>
#include <optional>
#include <string>

namespace emu::hccl {

struct Domain {
  uint32_t ranks, rank;
  uint32_t buffer_mb;      // of HCCL for this communicator
  bool has_collectives;    // other operations run on it, whose data would lie in the same windows
  // For tasks. Every rank offers as many bytes; `consume(begin, size, parts)` sees that stretch of
  // all offers, again and again until the end. `what` is compared between ranks.
  using Consume = std::function<void(size_t begin, size_t size, const char *const *parts)>;
  std::function<void(const std::string &what, const char *offer, size_t bytes, Consume)> exchange;
};

// By the name that HcclGetCommName tells; nothing if this process has no such rank. From now on the
// communicator is for operators that communicate inside their kernel: collectives are refused.
EMU_SHARED std::optional<Domain> find_domain(const std::string &name, uint32_t rank);

}  // namespace emu::hccl
