// The limits of a rank's waits for others, and the errors when a limit is reached.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace emu::hccl {

constexpr int kCheckMs = 100;  // interval at which a waiting rank checks whether its peers live

class Patience {
public:
  // For a dead peer, how its death is known; empty for a living one.
  using Death = std::function<std::string(uint32_t peer)>;

  // `is_destroyed`: of the communicator, if there is one yet.
  Patience(uint32_t rank, uint32_t ranks, std::string operation,
           const std::atomic<bool> *is_destroyed = nullptr)
      : rank_(rank), ranks_(ranks), operation_(std::move(operation)), is_destroyed_(is_destroyed) {}

  // Called every kCheckMs while a rank waits for `absent`. Throws if one of them is dead, if the
  // device has failed or the communicator was destroyed, or after hccl_s; `detail` names the cause
  // of the wait.
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
