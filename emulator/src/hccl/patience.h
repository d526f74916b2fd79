// The time limit of a rank's wait for other ranks, and the error when the limit is reached.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace emu::hccl {

constexpr int kCheckMs = 100;  // interval at which a waiting rank checks that its peers live

class Patience {
public:
  // If the peer is dead, returns a text that says how this was noticed. If the peer lives, returns
  // "".
  using Death = std::function<std::string(uint32_t peer)>;

  // `*is_destroyed` becomes true when the communicator is destroyed; null if no communicator exists
  // yet.
  Patience(uint32_t rank, uint32_t ranks, std::string operation,
           const std::atomic<bool> *is_destroyed = nullptr)
      : rank_(rank), ranks_(ranks), operation_(std::move(operation)), is_destroyed_(is_destroyed) {}

  // Called every kCheckMs while a rank waits for the ranks in `absent`. Throws if one of these
  // ranks is dead, if the device has failed, if the communicator was destroyed, or if the wait has
  // taken longer than the setting hccl_s. `detail` is a text that says why the rank waits.
  void ask(const std::vector<uint32_t> &absent, const Death &death = {},
           const std::string &detail = "") const;
  [[noreturn]] void is_dead(uint32_t peer, const std::string &how) const;

private:
  const uint32_t rank_, ranks_;
  const std::string operation_;
  const std::atomic<bool> *const is_destroyed_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace emu::hccl
