// For how long a device's kernels ran, and why the device was idle in the rest of the time. The
// device's streams report both.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace emu {

// The reason why a stream was idle. Host means that no task was queued.
enum class Idle { Host, Event, External, Collective, Copy, Update };
constexpr int kIdleCauses = 6;

struct IdleSpan {
  int64_t begin, end;
  Idle cause;
};

// Streams report in any order. The device is busy while at least one kernel of any stream runs. If
// the device was idle before a kernel, the kernel's stream reports why.
class DeviceTime {
public:
  static DeviceTime &of(int device);

  // A kernel ran from `begin` to `end`; before that, its stream waited as `idle` describes.
  void kernel(const std::vector<IdleSpan> &idle, int64_t begin, int64_t end);

  struct Totals {
    int64_t busy = 0;
    std::array<int64_t, kIdleCauses> idle{};
  };
  Totals totals() const;

private:
  mutable std::mutex mutex_;
  int64_t start_ = 0, frontier_ = 0;  // begin and end of all reported time
  std::array<int64_t, kIdleCauses> idle_{};
  std::deque<IdleSpan> gaps_;  // the latest spans that are counted in idle_

  void leave_gap(IdleSpan gap);
  void fill_gaps(int64_t begin, int64_t end);
};

}  // namespace emu
