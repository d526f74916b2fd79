// Streams, events and captured graphs. A handle is a plain pointer. An object owns itself until the
// program destroys it. It is freed when no queued task and no graph refers to it any more.
#pragma once

#include "runtime/errors.h"
#include "runtime/spin.h"
#include "runtime/timeline.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace emu {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Graph;
struct TaskGroup;
class Stream;

inline thread_local aclmdlRICaptureMode t_capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
inline thread_local std::string t_where;  // where a worker is: "stream 3" or "lane 1 of graph 7"

// Guards all values that captures and updates change in streams, events and captured graphs. It is
// locked by the capturing thread, by torch_npu's queue thread, and by threads that query events.
// Workers never lock it. No thread locks it while the thread holds the mutex of a stream or an
// event.
extern std::mutex g_capture_mutex;

// ---- waiting

extern std::atomic<bool> g_oversubscribed;  // see services.h

// Spins until `ready` returns true, for at most some tens of microseconds. Returns false if this
// time is over.
template <class Ready> bool spin_until(Ready ready);

// Lets a task wait until `ready` returns true. Throws if the device has failed, or if the wait has
// taken longer than the setting wait_s.
void wait_or_throw(Lock &lock, std::condition_variable &cv, const std::function<bool()> &ready,
                   const std::function<std::string()> &what);

// ---- objects

struct Event {
  const uint32_t id, flags;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t submitted = 0, completed = 0;  // generations: re-recording makes a new one
  // The time at which the last record of the event ended. Each record makes a new object for its
  // time, and a task that waits for a record keeps this record's object.
  std::shared_ptr<int64_t> moment = std::make_shared<int64_t>(0);
  int64_t timestamp_ns = 0;  // of the last complete record
  // The device on which the last record was queued, and the device's number of aborts at that time.
  // A later abort removes the record from the queue. In this case, no task waits for the record.
  int device = 0;
  uint32_t aborts = 0;
  bool external_set = false;
  std::atomic<int> recorded_on{-1};  // stream id of the last record
  std::weak_ptr<Graph> graph;  // of the last record, at graph_node; under g_capture_mutex
  int graph_node = -1;
  std::shared_ptr<Event> self;  // until destroyed

  explicit Event(uint32_t flags);
  ~Event();
  bool external() const { return flags & ACL_EVENT_EXTERNAL; }
  bool is_over(uint64_t generation) const {
    return completed >= generation || g_failures[device].aborts != aborts;
  }
  // Returns the active capture that recorded the event, or null. The caller must hold
  // g_capture_mutex.
  std::shared_ptr<Graph> capture() const;
  std::string name() const;
};

// A queue of tasks, and the worker thread that runs them. The thread is started when the queue is
// first used.
class Stream {
public:
  const int device, id;
  // g_capture_mutex guards the members from here to update_index.
  std::shared_ptr<Graph> graph;  // being captured
  TaskGroup *group = nullptr;    // open task group of the capture
  TaskGroup *update = nullptr;   // open task-update section, of update_graph
  std::shared_ptr<Graph> update_graph;
  size_t update_index = 0;
  int64_t update_ends_ns = 0;  // with modelled time: until then the host is busy with the update

  explicit Stream(int device);
  ~Stream();
  void post(const char *name, Task task);
  aclError synchronize(int timeout_ms = -1);
  bool drained() const { return completed_ == submitted_; }
  void cut(int64_t ns) { timeline_.cut(ns); }  // see Timeline; the queue must be empty
  bool idle() const { return drained() && timeline_.ns() <= host_ns(device); }
  bool captured() const {
    Lock lock(g_capture_mutex);
    return graph != nullptr;
  }

private:
  struct Item {
    const char *name;
    Task task;
    int64_t queued_ns;  // with modelled time
  };
  std::mutex mutex_;
  std::condition_variable pushed_, idle_;
  std::deque<Item> queue_;
  std::atomic<uint64_t> submitted_{0}, completed_{0};
  std::atomic<int> waiters_{0};
  std::atomic<const char *> running_{nullptr};
  bool sleeping_ = false, stopping_ = false;
  std::thread worker_;
  Timeline timeline_;

  aclError wait(uint64_t target, int timeout_ms);
  aclError sleep(int64_t until_ns, int timeout_ms) const;
  void work();
  bool next(Item &item);
  void run(const Item &item);
};

Stream *stream_of(aclrtStream handle);  // nullptr means the default stream of the current device
std::vector<Stream *> streams_of(int device);
// Waits until the device's modelled time is `until_ns`, or until the device has stopped. Returns
// the error of this wait; `aborts_before` is the number of aborts when the wait began.
aclError sleep_with_device(int device, int64_t until_ns, uint32_t aborts_before);

// Returns an error if the call is not permitted during an active capture. The capture stays valid,
// as in CANN's sources: api_error.cc returns the error, but does not terminate the capture.
aclError refuse_during_capture(const char *call);

template <class Ready> bool spin_until(Ready ready) {
  if (g_oversubscribed)
    return ready();
  for (int i = 0; i < 1000; i++) {
    if (ready())
      return true;
    for (int j = 0; j < 2; j++)
      spin_once();
  }
  return false;
}

}  // namespace emu
