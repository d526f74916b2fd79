// A captured graph: its nodes in the order of their capture. Each node is on a lane, which is a
// captured stream.
#pragma once

#include "runtime/objects.h"
#include "runtime/stream_budget.h"

#include <numeric>

namespace emu {

// The body of a node, which a task group may replace. Replays read the body, and update tasks write
// it.
struct UpdatableBody {
  std::mutex mutex;
  std::shared_ptr<const Task> task;
};

struct Node {
  TaskKind kind;
  const char *name;
  Task body;  // null for edges
  int lane = 0;
  bool ai_cpu = false;
  int waits_for = -1;                        // EventWait: index of the EventRecord node
  std::unique_ptr<UpdatableBody> updatable;  // instead of body: part of a task group

  void run() const;
};

struct TaskGroup {
  std::vector<int> nodes;
};

// g_capture_mutex guards a graph until its capture ends. After that, only the bodies of task groups
// change.
struct Graph : std::enable_shared_from_this<Graph> {
  const uint32_t id;
  const int device;
  const Stream *const origin;
  const aclmdlRICaptureMode mode;
  const std::thread::id capturing_thread;
  bool capturing = true;
  std::atomic<bool> invalid{false};
  std::vector<Node> nodes;
  std::map<Stream *, int> lanes;  // during the capture
  std::vector<std::unique_ptr<TaskGroup>> groups;
  std::shared_ptr<Graph> self;  // until destroyed
  std::atomic<int> in_flight{0};
  bool bound = false;  // has queues; owned by QueuePool

  Graph(Stream *origin, aclmdlRICaptureMode mode);
  ~Graph();

  // These functions may need a stream id. If no id is free, they invalidate the capture and return
  // the error code.
  aclError add_lane(Stream *stream);
  aclError append(Stream *stream, Node node, int *index = nullptr);
  aclError use_domain(const void *domain);

  void end_capture();  // streams leave the graph
  bool has_unjoined_lane() const;
  void replay() const;
  long stream_count() const { return std::accumulate(streams_.begin(), streams_.end(), 0L); }
  void release_streams();
  long ai_cpu_tasks() const;

private:
  StreamBudget::Held streams_{};  // stream ids; while the graph is bound, the same number of queues
  std::vector<long> lane_sqes_;  // entries of each lane's submission queue
  std::set<const void *> domains_;
  bool lanes_take_turns_ = false;
  bool each_task_follows_the_one_before() const;
  void replay_in_order() const;
  void replay_lanes() const;
  aclError take_streams(StreamBudget::Holder holder, long count, aclError code, const char *call);
};

bool is_capturing(int device);

}  // namespace emu
