// The capture of graphs: its records and its checks. Also the replay of graphs.
#include "runtime/graph.h"

#include "runtime/queue_pool.h"
#include "runtime/services.h"

#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <stdexcept>

#include <pthread.h>

namespace emu {

// The queue of a captured stream has 2048 entries, of which 32 are reserved. If a stream needs more
// entries, a cascaded stream is appended.
constexpr long kSqesPerStream = 2016;
// Returns the number of queue entries that a task needs. A wait for a word in device memory needs
// four.
static long sqes_of(const Node &node) { return node.kind == TaskKind::ExternalTask ? 4 : 1; }

static std::atomic<uint32_t> g_next_graph_id{1};

void Node::run() const {
  if (!updatable) {
    if (body)
      body();
    return;
  }
  std::shared_ptr<const Task> task;
  {
    Lock lock(updatable->mutex);
    task = updatable->task;
  }
  (*task)();
}

Graph::Graph(Stream *origin_, aclmdlRICaptureMode mode_)
    : id(g_next_graph_id++), device(origin_->device), origin(origin_), mode(mode_),
      capturing_thread(std::this_thread::get_id()) {}

Graph::~Graph() { release_streams(); }

// ---- capture

aclError Graph::take_streams(StreamBudget::Holder holder, long count, aclError code,
                             const char *call) {
  if (!StreamBudget::of(device).take(holder, count)) {
    invalid = true;
    return fail(code, "%s: %s", call, StreamBudget::of(device).shortage().c_str());
  }
  streams_[holder] += count;
  if (settings().software_sq)
    QueuePool::of(device).set_aside(count);
  return 0;
}

aclError Graph::add_lane(Stream *stream) {
  bool first = lanes.empty();
  if (aclError e = take_streams(
          StreamBudget::Captured, 1,
          first ? ACL_ERROR_RT_NO_STREAM_RESOURCE : ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
          first ? "capture begin" : "create capture stream failed"))
    return e;
  lanes.emplace(stream, static_cast<int>(lanes.size()));
  lane_sqes_.push_back(0);
  stream->graph = shared_from_this();
  return 0;
}

aclError Graph::append(Stream *stream, Node node, int *index) {
  node.lane = lanes.at(stream);
  long &sqes = lane_sqes_[node.lane], before = sqes;
  sqes += sqes_of(node);
  if (before > 0 && (before - 1) / kSqesPerStream != (sqes - 1) / kSqesPerStream)
    if (aclError e = take_streams(StreamBudget::Cascaded, 1, ACL_ERROR_RT_NO_STREAM_RESOURCE,
                                  "cascaded stream of a capture"))
      return e;
  int at = static_cast<int>(nodes.size());
  if (stream->group) {
    stream->group->nodes.push_back(at);
    node.updatable = std::make_unique<UpdatableBody>();
    node.updatable->task = std::make_shared<const Task>(std::move(node.body));
  }
  nodes.push_back(std::move(node));
  if (index)
    *index = at;
  return 0;
}

aclError Graph::use_domain(const void *domain) {
  if (!domains_.insert(domain).second)
    return 0;
  return take_streams(StreamBudget::GraphDomains, streams_per_graph(),
                      ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
                      "streams of a communication domain in a capture");
}

aclError use_domain(aclrtStream stream, const void *domain) {
  Stream *s = stream_of(stream);
  Lock lock(g_capture_mutex);
  return s->graph ? s->graph->use_domain(domain) : 0;
}

uint32_t graph_of_capture(aclrtStream stream) {
  Stream *s = stream_of(stream);
  Lock lock(g_capture_mutex);
  return s->graph ? s->graph->id : 0;
}

void Graph::end_capture() {
  auto alive = shared_from_this();
  for (auto &[stream, lane] : lanes) {
    stream->graph.reset();
    stream->group = nullptr;
  }
  lanes_take_turns_ = each_task_follows_the_one_before();
  capturing = false;
}

// Whether edges order each task after the task that was captured before it. If so, two lanes never
// run at the same time.
bool Graph::each_task_follows_the_one_before() const {
  // for each lane, the last task that the lane follows or contains
  std::vector<int> behind(lanes.size(), -1);
  std::vector<int> at_record(nodes.size(), -1);
  int last = -1;
  for (int i = 0; i < static_cast<int>(nodes.size()); i++) {
    const Node &node = nodes[i];
    int &follows = behind[node.lane];
    if (node.kind == TaskKind::EventRecord) {
      at_record[i] = follows;
    } else if (node.kind == TaskKind::EventWait) {
      follows = std::max(follows, at_record[node.waits_for]);
    } else {
      if (follows != last)
        return false;
      follows = last = i;
    }
  }
  return true;
}

// Whether a forked stream was not joined. A stream was joined if its last node records an event,
// and another lane waits for this event.
bool Graph::has_unjoined_lane() const {
  std::vector<int> last(lanes.size(), -1);
  std::vector<char> joined(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); i++) {
    last[nodes[i].lane] = static_cast<int>(i);
    if (nodes[i].kind == TaskKind::EventWait)
      joined[nodes[i].waits_for] = 1;
  }
  for (size_t lane = 1; lane < last.size(); lane++) {
    int i = last[lane];
    if (i >= 0 && !(nodes[i].kind == TaskKind::EventRecord && joined[i]))
      return true;
  }
  return false;
}

long Graph::ai_cpu_tasks() const {
  return std::count_if(nodes.begin(), nodes.end(), [](const Node &node) { return node.ai_cpu; });
}

// ---- streams of a finished graph

void Graph::release_streams() {
  QueuePool::of(device).unbind(*this);
  for (int holder = 0; holder < StreamBudget::kHolders; holder++)
    StreamBudget::of(device).release(StreamBudget::Holder(holder), streams_[holder]);
  streams_ = {};
}

// ---- replay

void Graph::replay() const {
  if (lanes_take_turns_)
    replay_in_order();
  else
    replay_lanes();
}

static std::string failed_node(const Graph &g, size_t i, const std::exception &e) {
  return "task " + std::to_string(i) + " of graph " + std::to_string(g.id) + ", " +
         g.nodes[i].name + ": " + e.what();
}

static std::string lane_name(const Graph &g, int lane) {
  return "lane " + std::to_string(lane) + " of graph " + std::to_string(g.id);
}

// A stopped device does not start further tasks.
static void run_node(const Node &node) {
  if (device_failed())
    throw std::runtime_error("given up, because the device failed");
  node.run();
}

namespace {

// The threads that run lanes. They are kept for the next replay.
class LaneThreads {
public:
  void run(Task task) {
    Lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (static_cast<int>(tasks_.size()) > idle_)
      std::thread([this] { work(); }).detach();
    changed_.notify_one();
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int idle_ = 0;

  void work() {
    pthread_setname_np(pthread_self(), "npu_lane");
    Lock lock(mutex_);
    for (;;) {
      idle_++;
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      idle_--;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }
};

// The state that the lanes of a replay share. Each lane owns a reference to it, so that the state
// exists until the last lane has ended.
struct LaneRun {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::atomic<char>> recorded;
  std::vector<int64_t> recorded_ns;  // with modelled time: times of records
  std::vector<std::unique_ptr<Timeline>> timelines;  // of all lanes but the first
  std::atomic<bool> failed{false};
  std::string error;
  aclError code = 0;
  int running = 0;

  explicit LaneRun(size_t nodes) : recorded(nodes), recorded_ns(nodes) {}
};

void wait_for_edge(LaneRun &run, const Graph &g, int record) {
  auto ready = [&] { return run.recorded[record] || run.failed; };
  if (spin_until(ready))
    return;
  Lock lock(run.mutex);
  wait_or_throw(lock, run.changed, ready, [&] {
    return "task " + std::to_string(record) + " on " + lane_name(g, g.nodes[record].lane);
  });
}

void run_lane(LaneRun &run, const Graph &g, int lane) {
  size_t i = 0;
  try {
    for (; i < g.nodes.size() && !run.failed; i++) {
      const Node &node = g.nodes[i];
      if (node.lane != lane)
        continue;
      if (node.kind == TaskKind::EventRecord) {
        Lock lock(run.mutex);
        run.recorded_ns[i] = t_timeline ? t_timeline->ns() : 0;
        run.recorded[i] = 1;
        run.changed.notify_all();
      } else if (node.kind == TaskKind::EventWait) {
        wait_for_edge(run, g, node.waits_for);
        if (t_timeline)
          t_timeline->wait_until(run.recorded_ns[node.waits_for], Idle::Event);
      } else {
        run_node(node);
      }
    }
  } catch (const std::exception &e) {
    Lock lock(run.mutex);
    if (run.error.empty()) {
      run.error = failed_node(g, i, e);
      run.code = code_of(e);
    }
    run.failed = true;
  }
  Lock lock(run.mutex);
  run.running--;
  run.changed.notify_all();
}

// The calling worker runs the lanes of a graph alternately, and takes the identity of the lane that
// it runs. At the beginning and at the end, the worker has the identity of the first lane.
class Turns {
public:
  Turns(const Graph &graph, size_t lanes) : graph_(graph) {
    for (size_t lane = 1; worker_ && lane < lanes; lane++)
      others_.emplace_back(graph.device, worker_->ns());
  }
  ~Turns() { give_to(0); }
  Turns(const Turns &) = delete;

  void give_to(int lane) {
    if (lane == lane_)
      return;
    lane_ = lane;
    if (worker_)
      t_timeline = lane ? &others_[lane - 1] : worker_;
    t_where = lane ? lane_name(graph_, lane) : where_;
  }
  // The worker continues when all lanes have ended.
  void join() {
    for (const Timeline &other : others_)
      worker_->wait_until(other.ns(), Idle::Event);
  }

private:
  const Graph &graph_;
  Timeline *const worker_ = t_timeline;
  const std::string where_ = t_where;
  std::deque<Timeline> others_;  // with modelled time
  int lane_ = 0;
};

}  // namespace

// Replays a graph with one lane, or with several lanes of which only one can run at a time. The
// second case occurs, for example, if the graph waits for each collective directly after its
// launch. Such lanes need no separate threads. Separate threads would have to wake each other.
void Graph::replay_in_order() const {
  Turns turns(*this, lane_sqes_.size());
  std::vector<int64_t> recorded_ns(t_timeline ? nodes.size() : 0);
  size_t i = 0;
  try {
    for (; i < nodes.size(); i++) {
      const Node &node = nodes[i];
      turns.give_to(node.lane);
      if (t_timeline && node.kind == TaskKind::EventRecord)
        recorded_ns[i] = t_timeline->ns();
      else if (t_timeline && node.kind == TaskKind::EventWait)
        t_timeline->wait_until(recorded_ns[node.waits_for], Idle::Event);
      else
        run_node(node);
    }
  } catch (const std::exception &e) {
    throw TaskError(code_of(e), failed_node(*this, i, e));
  }
  turns.join();
}

// Each lane runs in its own thread, and the first lane runs in the calling worker. Captured edges
// order the tasks of the lanes.
void Graph::replay_lanes() const {
  static auto *threads = new LaneThreads;  // never destroyed: its threads are detached
  auto run = std::make_shared<LaneRun>(nodes.size());
  int lane_count = static_cast<int>(lane_sqes_.size());
  run->running = lane_count;
  auto graph = shared_from_this();
  if (t_timeline)
    for (int lane = 1; lane < lane_count; lane++)
      run->timelines.push_back(std::make_unique<Timeline>(device, t_timeline->ns()));
  for (int lane = 1; lane < lane_count; lane++)
    threads->run([run, graph, lane] {
      t_timeline = run->timelines.empty() ? nullptr : run->timelines[lane - 1].get();
      t_device = graph->device;
      t_where = lane_name(*graph, lane);
      run_lane(*run, *graph, lane);
    });
  run_lane(*run, *this, 0);
  Lock lock(run->mutex);
  run->changed.wait(lock, [&] { return run->running == 0; });
  for (auto &lane : run->timelines)
    t_timeline->wait_until(lane->ns(), Idle::Event);
  if (!run->error.empty())
    throw TaskError(run->code, run->error);
}

}  // namespace emu
