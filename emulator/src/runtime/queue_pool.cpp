#include "runtime/queue_pool.h"

#include "runtime/counters.h"
#include "runtime/graph.h"

#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>

namespace emu {

QueuePool &QueuePool::of(int device) {
  static std::mutex creation;
  static std::map<int, QueuePool> pools;
  Lock lock(creation);
  return pools.try_emplace(device, device).first->second;
}

long QueuePool::unused() const {
  StreamBudget::Held held = StreamBudget::of(device_).held();
  return settings().streams - held[StreamBudget::Streams] - held[StreamBudget::Domains] - size_;
}

void QueuePool::set_aside(long count) {
  Lock lock(mutex_);
  size_ += std::clamp(std::min(kMost - size_, unused()), 0L, count);
}

bool QueuePool::provide(long count) {
  long missing = count - (size_ - bound_);
  if (missing <= 0)
    return true;
  if (size_ + missing > kMost)
    return false;
  long got = std::clamp(unused(), 0L, missing);
  size_ += got;
  return got == missing;
}

void QueuePool::recycle(long count) {
  for (auto g = graphs_.begin(); g != graphs_.end() && count > 0;) {
    if ((*g)->in_flight) {
      ++g;
      continue;
    }
    (*g)->bound = false;
    bound_ -= (*g)->stream_count();
    count -= (*g)->stream_count();
    g = graphs_.erase(g);
  }
}

aclError QueuePool::bind(Graph &graph) {
  const long wanted = graph.stream_count();
  if (wanted > kMost)
    return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
                "EE1023: too many streams captured: the graph needs %ld queues, at most %ld",
                wanted, kMost);
  auto end = Clock::now() + std::chrono::seconds(settings().wait_s);
  for (;;) {
    {
      Lock lock(mutex_);
      if (graph.bound)
        return 0;
      if (provide(wanted)) {
        bound_ += wanted;
        graph.bound = true;
        auto later = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](Graph *g) { return g->id > graph.id; });
        graphs_.insert(later, &graph);
        count(Counters::of(device_).queue_bindings);
        return 0;
      }
      recycle(wanted);
      if (wanted > size_ || Clock::now() > end)
        return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
                    "alloc sq cq fail: %ld queues wanted, %ld of the %ld of graphs are in use",
                    wanted, bound_, size_);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void QueuePool::unbind(Graph &graph) {
  Lock lock(mutex_);
  if (!graph.bound)
    return;
  graphs_.remove(&graph);
  bound_ -= graph.stream_count();
  graph.bound = false;
}

bool QueuePool::spare(long count) {
  Lock lock(mutex_);
  for (; unused() < 0 && count > 0; count--) {
    if (size_ == bound_)
      recycle(1);
    if (size_ == bound_)
      break;
    size_--;
  }
  return unused() >= 0;
}

long QueuePool::size() {
  Lock lock(mutex_);
  return size_;
}
long QueuePool::bound() {
  Lock lock(mutex_);
  return bound_;
}
long QueuePool::available() {
  Lock lock(mutex_);
  return std::max(0L, unused());
}

bool take_running_streams(int device, StreamBudget::Holder holder, long count) {
  StreamBudget &ids = StreamBudget::of(device);
  if (!ids.take(holder, count))
    return false;
  if (!settings().software_sq || QueuePool::of(device).spare(count))
    return true;
  ids.release(holder, count);
  return false;
}

}  // namespace emu
