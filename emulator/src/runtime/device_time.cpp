#include "runtime/device_time.h"

#include "emulator.h"

#include <algorithm>
#include <numeric>

namespace emu {

constexpr size_t kGaps = 4096;  // number of kept gaps; a late stream cannot fill an older gap

DeviceTime &DeviceTime::of(int device) {
  static DeviceTime devices[kMaxDevices];
  return devices[device];
}

void DeviceTime::leave_gap(IdleSpan gap) {
  idle_[int(gap.cause)] += gap.end - gap.begin;
  gaps_.push_back(gap);
  if (gaps_.size() > kGaps)
    gaps_.pop_front();
}

void DeviceTime::fill_gaps(int64_t begin, int64_t end) {
  for (size_t i = gaps_.size(); i-- > 0 && gaps_[i].end > begin;) {
    IdleSpan gap = gaps_[i];
    int64_t from = std::max(begin, gap.begin), to = std::min(end, gap.end);
    if (from >= to)
      continue;
    idle_[int(gap.cause)] -= to - from;
    gaps_[i].end = from;
    if (to < gap.end)
      gaps_.insert(gaps_.begin() + i + 1, {to, gap.end, gap.cause});
  }
}

void DeviceTime::kernel(const std::vector<IdleSpan> &idle, int64_t begin, int64_t end) {
  std::lock_guard lock(mutex_);
  if (!start_)
    start_ = frontier_ = begin;
  for (IdleSpan span : idle) {
    span.begin = std::max(span.begin, frontier_);
    if (span.begin < span.end)
      leave_gap(span);
    frontier_ = std::max(frontier_, span.end);
  }
  if (frontier_ < begin)  // the stream's first kernel: the stream was unused before
    leave_gap({frontier_, begin, Idle::Host});
  fill_gaps(begin, end);
  frontier_ = std::max(frontier_, end);
}

DeviceTime::Totals DeviceTime::totals() const {
  std::lock_guard lock(mutex_);
  int64_t all = std::accumulate(idle_.begin(), idle_.end(), int64_t(0));
  return {frontier_ - start_ - all, idle_};
}

}  // namespace emu
