// The hardware queues of a device, if the setting accounting is software_sq. Every stream has an
// id. A stream that the program or HCCL made has its own queue for its whole life. A stream of a
// graph has a queue only while the graph is bound to queues. The queues for graphs are in a pool. A
// capture adds one queue per stream to the pool, as long as the device has free queues and the pool
// has fewer than 1024. So a capture never fails because queues are missing. The first execution
// binds a graph to queues. The graph stays bound until another graph needs its queues. Idle graphs
// lose their queues in the order in which the graphs were created. The pool becomes smaller only if
// a stream outside graphs needs a queue and no other queue is free.
#pragma once

#include "runtime/stream_budget.h"

#include "emulator.h"

#include <list>
#include <mutex>

namespace emu {

struct Graph;

class QueuePool {
public:
  static constexpr long kMost = 1024;  // queues of the pool, and of one graph

  explicit QueuePool(int device) : device_(device) {}
  static QueuePool &of(int device);

  void set_aside(long count);   // a graph has captured `count` more streams
  aclError bind(Graph &graph);  // before an execution; waits while too many graphs run
  void unbind(Graph &graph);
  // Frees queues for `count` new streams outside graphs, which are already counted. Returns false
  // if there are not enough queues.
  bool spare(long count);

  long size();
  long bound();
  long available();  // queues that belong neither to a stream nor to the pool

private:
  const int device_;
  std::mutex mutex_;
  std::list<Graph *> graphs_;  // bound, in the order of creation
  long size_ = 0, bound_ = 0;

  long unused() const;
  bool provide(long count);  // pooled and unbound
  void recycle(long count);
};

// Takes ids and queues for `count` streams outside graphs. If there are too few ids or queues,
// takes none and returns false.
bool take_running_streams(int device, StreamBudget::Holder holder, long count);

}  // namespace emu
