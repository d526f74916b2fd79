// How long a rank waits for others, and what it says when it gives up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace emu::hccl {

constexpr int kCheckMs = 100;  // how often who waits looks whether its peers live

class Patience {
public:
  // Of a peer that is dead, how that is known; of one that lives nothing.
  using Death = std::function<std::string(uint32_t peer)>;

  // `is_destroyed`: of the communicator, if there is one yet.
  Patience(uint32_t rank, uint32_t ranks, std::string operation,
           const std::atomic<bool> *is_destroyed = nullptr)
      : rank_(rank), ranks_(ranks), operation_(std::move(operation)), is_destroyed_(is_destroyed) {}

  // To be asked every kCheckMs by who waits for `absent`. Throws if one of them is dead, if the
  // device has failed or the communicator was destroyed, or when hccl_s has passed; `detail` says what the wait hangs on.
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
