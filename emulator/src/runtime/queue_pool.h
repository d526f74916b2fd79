// Accounting software_sq: the hardware queues of a device. Every stream has an id. A stream that
// the program or HCCL made holds a queue for its whole life. A stream of a graph only borrows a
// queue while the graph is bound. Queues for graphs are in a pool. A capture adds one queue per
// stream to the pool, as long as the device has free queues and the pool has fewer than 1024; a
// capture never fails for lack of queues. The first execution binds a graph to queues. The graph
// stays bound until another graph needs these queues: idle graphs lose their queues in the order of
// the graphs' creation. The pool shrinks only for a stream that finds no other queue.
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
  // Makes room for `count` more running streams, which are already counted. False if there is no
  // room.
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

// Takes ids and queues for streams outside graphs. If ids or queues are missing, takes nothing and
// returns false.
bool take_running_streams(int device, StreamBudget::Holder holder, long count);

}  // namespace emu
