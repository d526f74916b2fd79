// Streams, events and captured graphs of the emulated runtime, and the state they share.
#pragma once

#include "emulator.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace emu {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;
using Body = std::function<void()>;

inline thread_local int t_device = -1;
inline thread_local aclmdlRICaptureMode t_capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
inline int current_device() { return t_device < 0 ? 0 : t_device; }

// A kernel error stops the whole device: later launches, waits and synchronizes report it.
struct DeviceError {
  std::atomic<aclError> code{0};
  std::mutex mutex;
  std::string message;

  void set(aclError new_code, std::string text);  // keeps the first error
  aclError report();                              // 0, or the code with the message set
};
inline DeviceError g_device_errors[kMaxDevices];

struct Graph;
struct Stream;
struct Event;

struct Node {
  TaskKind kind;
  std::string name;
  std::shared_ptr<Body> body;  // null for edges
  int lane = 0;                // which captured stream the node belongs to
  int waits_for = -1;          // EventWait: index of the EventRecord node
};

struct TaskGroup {
  Graph *graph;
  std::vector<int> nodes;
};

struct Graph {
  uint32_t id;
  int device;
  Stream *origin;
  aclmdlRICaptureMode mode;
  std::thread::id capturing_thread;
  bool capturing = true;
  bool invalid = false;
  long held_streams = 0;
  std::vector<Node> nodes;
  std::map<Stream *, int> lanes;
  std::vector<std::unique_ptr<TaskGroup>> groups;
  std::mutex mutex;  // node bodies: replay against update

  int append(Stream *stream, Node node);
  void run_node(int index);
  void replay();
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint32_t flags = 0;
  uint64_t submitted = 0, completed = 0;  // generations: re-recording makes a new one
  double timestamp_ms = 0;
  bool external_set = false;
  Graph *graph = nullptr;  // last recorded in this capture, at graph_node
  int graph_node = -1;

  bool external() const { return flags & ACL_EVENT_EXTERNAL; }
  bool captured() const { return graph && graph->capturing; }
};

// A queue with its own worker thread, started at first use.
struct Stream {
  int device, id;
  std::mutex mutex;
  std::condition_variable pushed, idle;
  std::deque<Body> queue;
  bool busy = false, stopping = false;
  std::thread worker;

  Graph *graph = nullptr;       // being captured
  TaskGroup *group = nullptr;   // open task group of the capture
  TaskGroup *update = nullptr;  // open task-update section
  size_t update_index = 0;

  void post(Body body);
  aclError synchronize(int timeout_ms = -1);
  void stop();

private:
  void work();
  void run(const Body &body);
};

inline std::mutex g_mutex;  // the four below
inline std::vector<Stream *> g_streams;
inline std::map<int, Stream *> g_default_streams;
inline std::map<int, long> g_held_streams;  // by captured graphs, per device
inline std::vector<Graph *> g_capturing;

Stream *new_stream(int device);
Stream *stream_of(aclrtStream handle);  // nullptr means the default stream of the current device
std::vector<Stream *> all_streams();
double now_ms();

// For tasks: waits until `ready`; throws if the device has failed or EMU_NPU_WAIT_SEC has passed.
void wait_or_throw(Lock &lock, std::condition_variable &cv, const std::function<bool()> &ready,
                   const char *what);

// Refuses (and invalidates the capture) if the call is not permitted during an active capture.
aclError refuse_during_capture(const char *call);

}  // namespace emu
