// Modelled time (kernels=timed). Each stream has a clock, in nanoseconds of the host's monotonic
// clock. The stream's clock shows when the stream's work so far would end on the modelled chip.
// Workers run tasks as soon as the order of the tasks permits, so the clocks of streams are ahead
// of the host's clock. A host thread that waits for a stream sleeps until the time on the stream's
// clock.
#pragma once

#include "emulator.h"
#include "runtime/device_time.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace emu {

int64_t now_ns();
void sleep_until_ns(int64_t ns);

// The modelled time of the host that works with a device. For some calls, CANN's code on the host
// needs more time than the emulator. These differences are added up. The host's modelled time is
// ahead of the real clock by the sum. The host later sleeps for the duration of the sum: once for
// several calls, and always before it reads a result of the device. All threads share one sum,
// because torch_npu's task queue launches calls for another thread.
int64_t host_ns(int device);
void host_works_until(int device, int64_t ns);
void pay_host_time(int device);

// The clock of a stream, or of a lane of a replayed graph. Only the worker of the stream moves it.
class Timeline {
public:
  Timeline(int device, int64_t ns = 0) : device_(device), ns_(ns) {}
  int64_t ns() const { return ns_.load(std::memory_order_relaxed); }

  // Begins a task that was queued at the time `queued_ns`.
  void begin(int64_t queued_ns);
  // Moves the clock to `ns` if this is later than the clock's time. Returns by how much the clock
  // was moved.
  int64_t wait_until(int64_t ns, Idle cause);
  int64_t pass(int64_t ns, Idle cause) { return wait_until(this->ns() + ns, cause); }
  // Moves the clock by the duration of a kernel.
  void work(int64_t ns);
  // For a collective: stores the cost, but does not move the clock yet. The cost counts from the
  // arrival of the last rank.
  void start_kernel(int64_t cost_ns) { cost_ns_ = cost_ns; }
  int64_t cost_ns() const { return cost_ns_; }
  void meet(int64_t latest_ns, int64_t cost_ns);
  void end_kernel() { work(cost_ns_); }
  // Moves the clock back to this time, because the device was stopped and later work did not
  // happen. The stream must be idle.
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

// Wraps the body of a launch. The wrapped body also moves the clock by the time of the launch.
Task on_clock(TaskKind kind, const LaunchTraits &traits, Task body);

}  // namespace emu
