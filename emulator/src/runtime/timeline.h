// Modelled time (kernels=timed). A stream has a clock, in nanoseconds of the host's monotonic clock:
// when what it has been given ends on the modelled chip. Workers carry out tasks as soon as their order
// permits, so clocks run ahead of the host; whoever waits on the host sleeps until the clock's time.
#pragma once

#include "emulator.h"
#include "runtime/device_time.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace emu {

int64_t now_ns();
void sleep_until_ns(int64_t ns);

// The time of the host that works with a device. CANN's host side takes longer for some calls than the
// emulator does; the host owes the difference, and its time is ahead of the clock by what it owes. It
// pays by sleeping, in larger pieces than calls are, and before it learns anything of the device. One
// account for all threads: torch_npu's task queue launches what another thread has called.
int64_t host_ns(int device);
void host_works_until(int device, int64_t ns);
void pay_host_time(int device);

// The clock of a stream, or of a lane of a graph while it is replayed. Only its worker moves it.
class Timeline {
public:
  Timeline(int device, int64_t ns = 0) : device_(device), ns_(ns) {}
  int64_t ns() const { return ns_.load(std::memory_order_relaxed); }

  // The task was handed over at this time.
  void begin(int64_t queued_ns);
  // Stands until then, if it has not come; returns how long.
  int64_t wait_until(int64_t ns, Idle cause);
  int64_t pass(int64_t ns, Idle cause) { return wait_until(this->ns() + ns, cause); }
  // A kernel runs.
  void work(int64_t ns);
  // As one task that takes part in a collective: its cost counts from the latest rank's arrival.
  void start_kernel(int64_t cost_ns) { cost_ns_ = cost_ns; }
  int64_t cost_ns() const { return cost_ns_; }
  void meet(int64_t latest_ns, int64_t cost_ns);
  void end_kernel() { work(cost_ns_); }
  // What was to come behind this time does not come: the device was stopped. For an idle stream.
  void cut(int64_t ns);

private:
  const int device_;
  std::atomic<int64_t> ns_;
  int64_t cost_ns_ = 0;
  std::vector<IdleSpan> idle_;  // since the last kernel
};

// That of the calling worker; null elsewhere, and without modelled time.
inline thread_local Timeline *t_timeline = nullptr;

// The body of a launch, which takes this time besides.
Task on_clock(TaskKind kind, const LaunchTraits &traits, Task body);

}  // namespace emu
