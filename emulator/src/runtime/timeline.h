// Modelled time (kernels=timed). A stream has a clock, in nanoseconds of the host's monotonic
// clock: the end of its work on the modelled chip. Workers run tasks as soon as the tasks' order
// permits, so clocks run ahead of the host; a waiting host thread sleeps until the clock's time.
#pragma once

#include "emulator.h"
#include "runtime/device_time.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace emu {

int64_t now_ns();
void sleep_until_ns(int64_t ns);

// The time of the host that works with a device. For some calls, CANN's code on the host takes
// longer than the emulator. The differences are summed up, and the host's modelled time is ahead of
// the real clock by this sum. The host sleeps for this time later: for several calls together, and
// always before it reads a result of the device. All threads share one sum, because torch_npu's
// task queue launches the calls of another thread.
int64_t host_ns(int device);
void host_works_until(int device, int64_t ns);
void pay_host_time(int device);

// The clock of a stream, or of a lane of a replayed graph. Only the worker of the stream moves it.
class Timeline {
public:
  Timeline(int device, int64_t ns = 0) : device_(device), ns_(ns) {}
  int64_t ns() const { return ns_.load(std::memory_order_relaxed); }

  // Begins a task that was queued at this time.
  void begin(int64_t queued_ns);
  // Moves the clock to `ns` if this is later; returns the waiting time.
  int64_t wait_until(int64_t ns, Idle cause);
  int64_t pass(int64_t ns, Idle cause) { return wait_until(this->ns() + ns, cause); }
  // Adds the run of a kernel.
  void work(int64_t ns);
  // For a task of a collective, whose cost counts from the latest rank's arrival.
  void start_kernel(int64_t cost_ns) { cost_ns_ = cost_ns; }
  int64_t cost_ns() const { return cost_ns_; }
  void meet(int64_t latest_ns, int64_t cost_ns);
  void end_kernel() { work(cost_ns_); }
  // Drops the work after this time, because the device was stopped. The stream must be idle.
  void cut(int64_t ns);

private:
  const int device_;
  std::atomic<int64_t> ns_;
  int64_t cost_ns_ = 0;
  std::vector<IdleSpan> idle_;  // since the last kernel
};

// The timeline of the worker that runs on this thread; null on other threads, and on all threads
// without modelled time.
inline thread_local Timeline *t_timeline = nullptr;

// Wraps the body of a launch, so that it moves the clock by the launch's time.
Task on_clock(TaskKind kind, const LaunchTraits &traits, Task body);

}  // namespace emu
