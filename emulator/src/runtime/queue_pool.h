// Accounting software_sq: the hardware queues of a device. Every stream has an id. A stream that
// the program or HCCL made holds a queue for its whole life. A stream of a graph only borrows a
// queue while the graph is bound. Queues for graphs are in a pool: a capture adds one queue per
// stream, as long as the device has free ones and the pool has fewer than 1024; it never fails for
// lack of queues. The first execution binds a graph, which stays bound until another graph needs
// its queues: idle graphs lose them in the order of their creation. The pool shrinks only for a
// stream that finds no other queue.
#pragma once

#include "runtime/stream_budget.h"

#include "emulator.h"

#include <list>
#include <mutex>

namespace emu {

struct Graph;

class QueuePool {
public:
  static constexpr long kMost = 1024;  // of the pool, and of one graph

  explicit QueuePool(int device) : device_(device) {}
  static QueuePool &of(int device);

  void set_aside(long count);   // a graph captured so many more streams
  aclError bind(Graph &graph);  // before its execution; waits while others run
  void unbind(Graph &graph);
  bool spare(long count);       // so many more running streams, counted already; false if too many

  long size();
  long bound();
  long available();  // queues that are neither a stream's nor the pool's

private:
  const int device_;
  std::mutex mutex_;
  std::list<Graph *> graphs_;  // bound, in the order of creation
  long size_ = 0, bound_ = 0;

  long unused() const;
  bool provide(long count);  // pooled and unbound
  void recycle(long count);
};

// Takes ids and queues for streams outside graphs; false, and takes nothing, if one is short.
bool take_running_streams(int device, StreamBudget::Holder holder, long count);

}  // namespace emu
