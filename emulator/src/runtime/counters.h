// The counts of a device since the start of the process. Only emulator_counters() reads them;
// nothing in the emulator depends on them.
#pragma once

#include "emulator.h"

#include <atomic>
#include <chrono>

namespace emu {

struct Counters {
  std::atomic<long> graphs{0};  // captured and not destroyed
  std::atomic<long> external_waits{0}, external_wait_ns{0};
  std::atomic<long> task_updates{0};
  std::atomic<long> queue_bindings{0};
  std::atomic<long> collectives{0};  // executed collectives, in replays too
  std::atomic<long> collective_bytes{0};  // bytes that they brought to this rank
  std::atomic<long> socket_bytes{0};      // bytes read from ranks of other hosts
  std::atomic<long> careless_destroys{0};  // destroyed communicators that were still in use
  std::atomic<long> host_syncs{0};   // calls in which the host waits for the device
  std::atomic<long> ai_cpu{0}, unaligned_views{0};  // executed launches, in replays too
  std::atomic<long> ai_cpu_captured{0};             // tasks of graphs

  static Counters &of(int device);
};

inline void count(std::atomic<long> &counter, long by = 1) {
  counter.fetch_add(by, std::memory_order_relaxed);
}

void count_traits(int device, LaunchTraits traits);

// An object of this class exists while a stream waits for an external event. The wait is counted if
// it is part of a graph.
class ExternalWait {
public:
  ExternalWait(int device, bool captured)
      : device_(device), captured_(captured), start_(Clock::now()) {}
  ~ExternalWait() {
    if (!captured_)
      return;
    count(Counters::of(device_).external_waits);
    count(Counters::of(device_).external_wait_ns,
          settings().timed ? modelled_ns_ : std::chrono::nanoseconds(Clock::now() - start_).count());
  }
  ExternalWait(const ExternalWait &) = delete;
  void modelled(int64_t ns) { modelled_ns_ = ns; }

private:
  using Clock = std::chrono::steady_clock;
  const int device_;
  const bool captured_;
  const Clock::time_point start_;
  int64_t modelled_ns_ = 0;
};

}  // namespace emu
