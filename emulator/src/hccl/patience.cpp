#include "hccl/patience.h"

#include "runtime/services.h"
#include "settings.h"

#include <stdexcept>

namespace emu::hccl {

void Patience::is_dead(uint32_t peer, const std::string &how) const {
  throw std::runtime_error("HCCL: rank " + std::to_string(peer) + " of " + std::to_string(ranks_) +
                           " is dead (" + how + "); rank " + std::to_string(rank_) + " is in " +
                           operation_);
}

void Patience::ask(const std::vector<uint32_t> &absent, const Death &death,
                   const std::string &detail) const {
  std::string missing;
  for (uint32_t r : absent) {
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    std::string how = death ? death(r) : "";
    if (!how.empty())
      is_dead(r, how);
  }
  if (is_destroyed_ && *is_destroyed_)
    throw std::runtime_error("HCCL: the communicator was destroyed while rank " +
                             std::to_string(rank_) + " was in " + operation_);
  if (device_failed())
    throw std::runtime_error("HCCL: given up, because the device failed, in " + operation_);
  if (std::chrono::steady_clock::now() - start_ > std::chrono::seconds(settings().hccl_s))
    throw std::runtime_error("HCCL timeout after " + std::to_string(settings().hccl_s) +
                             " s: rank " + std::to_string(rank_) + " of " +
                             std::to_string(ranks_) + " in " + operation_ + " waits for rank " +
                             missing + detail);
}

}  // namespace emu::hccl
