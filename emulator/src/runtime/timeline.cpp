#include "runtime/timeline.h"

#include "rates.h"
#include "runtime/errors.h"
#include "runtime/services.h"

#include <algorithm>
#include <cerrno>

#include <sys/prctl.h>
#include <time.h>

namespace emu {

constexpr size_t kSpans = 64;  // limit of the list, for a stream without kernels
constexpr int64_t kMaxOwedNs = 1000000;  // sleeping for every call would cool the caches

static std::atomic<int64_t> g_owed_ns[kMaxDevices];

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// By default, the system wakes sleeping threads up to 50 us late. So the thread requests a smaller
// timer slack.
void sleep_until_ns(int64_t ns) {
  if (now_ns() >= ns)
    return;
  int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  timespec end{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR)
    ;
  if (slack > 0)
    prctl(PR_SET_TIMERSLACK, slack);
}

int64_t host_ns(int device) { return now_ns() + g_owed_ns[device]; }

void host_works_until(int device, int64_t ns) {
  int64_t missing = ns - host_ns(device);
  if (missing > 0 && (g_owed_ns[device] += missing) > kMaxOwedNs)
    pay_host_time(device);
}

void pay_host_time(int device) {
  if (int64_t owed = g_owed_ns[device].exchange(0))
    sleep_until_ns(now_ns() + owed);
}

void Timeline::begin(int64_t queued_ns) {
  if (ns() == 0)
    ns_ = queued_ns;
  else
    wait_until(queued_ns, Idle::Host);
}

int64_t Timeline::wait_until(int64_t until, Idle cause) {
  int64_t from = ns();
  if (until <= from)
    return 0;
  if (!idle_.empty() && idle_.back().cause == cause)
    idle_.back().end = until;
  else
    idle_.push_back({from, until, cause});
  if (idle_.size() > kSpans)
    idle_.erase(idle_.begin());
  ns_ = until;
  return until - from;
}

void Timeline::work(int64_t ns) {
  if (ns <= 0)
    return;
  int64_t from = this->ns();
  DeviceTime::of(device_).kernel(idle_, from, from + ns);
  idle_.clear();
  ns_ = from + ns;
  cost_ns_ = 0;
}

void Timeline::meet(int64_t latest_ns, int64_t cost_ns) {
  wait_until(latest_ns, Idle::Collective);
  work(cost_ns);
  cost_ns_ = 0;
}

void Timeline::cut(int64_t ns) {
  ns_ = std::min(this->ns(), ns);
  idle_.clear();
  cost_ns_ = 0;
}

Task on_clock(TaskKind kind, const LaunchTraits &traits, Task body) {
  const int64_t ns = traits.ns;
  switch (kind) {
  case TaskKind::Kernel:
    return [ns, body = std::move(body)] {
      t_timeline->start_kernel(ns);
      body();
      t_timeline->end_kernel();
    };
  case TaskKind::Copy:
    return [ns, between = traits.between_host_and_device, body = std::move(body)] {
      body();
      if (between)
        t_timeline->pass(ns, Idle::Copy);
      else
        t_timeline->work(ns);
    };
  case TaskKind::ExternalTask:
    return [body = std::move(body)] {
      t_timeline->pass(microseconds(rates().event_us), Idle::Event);
      body();
    };
  case TaskKind::HostCallback:
    return [body = std::move(body)] {
      sleep_until_ns(t_timeline->ns());
      body();
      t_timeline->wait_until(now_ns(), Idle::Host);
    };
  case TaskKind::GraphLaunch:
    return [launched = host_ns(current_device()), body = std::move(body)] {
      t_timeline->wait_until(launched + microseconds(rates().graph_launch_us), Idle::Host);
      body();
    };
  default:
    return body;
  }
}

// ---- services.h

int64_t arrival_ns() { return t_timeline ? t_timeline->ns() : 0; }
int64_t kernel_ns() { return t_timeline ? t_timeline->cost_ns() : 0; }
void meet_ranks(int64_t latest_ns, int64_t cost_ns) {
  if (t_timeline)
    t_timeline->meet(latest_ns, cost_ns);
}

}  // namespace emu
