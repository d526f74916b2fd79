// Launching tasks, streams, events, value waits, host callbacks.
#include "runtime_objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace emu {

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

void DeviceError::set(aclError new_code, std::string text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (code)
    return;
  message = std::move(text);
  code = new_code;
}

aclError DeviceError::report() {
  if (!code)
    return 0;
  std::lock_guard<std::mutex> lock(mutex);
  return fail(code, "%s", message.c_str());
}

// ---- streams

void Stream::work() {
  t_device = device;
  Lock lock(mutex);
  for (;;) {
    pushed.wait(lock, [&] { return stopping || !queue.empty(); });
    if (queue.empty())
      return;
    Body body = std::move(queue.front());
    queue.pop_front();
    busy = true;
    lock.unlock();
    run(body);
    body = nullptr;  // frees what the task holds before the stream counts as idle
    lock.lock();
    busy = false;
    if (queue.empty())
      idle.notify_all();
  }
}

void Stream::run(const Body &body) {
  DeviceError &error = g_device_errors[device];
  if (error.code)
    return;
  try {
    body();
  } catch (const std::exception &e) {
    fprintf(stderr, "[emu] stream %d: %s\n", id, e.what());
    error.set(ACL_ERROR_RT_AICORE_EXCEPTION, "stream " + std::to_string(id) + ": " + e.what());
  }
}

void Stream::post(Body body) {
  Lock lock(mutex);
  if (!worker.joinable())
    worker = std::thread([this] { work(); });
  queue.push_back(std::move(body));
  pushed.notify_one();
}

aclError Stream::synchronize(int timeout_ms) {
  {
    Lock lock(mutex);
    auto drained = [&] { return queue.empty() && !busy; };
    if (timeout_ms < 0)
      idle.wait(lock, drained);
    else if (!idle.wait_for(lock, std::chrono::milliseconds(timeout_ms), drained))
      return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d: synchronize timed out", id);
  }
  return g_device_errors[device].report();
}

void Stream::stop() {
  {
    Lock lock(mutex);
    stopping = true;
    pushed.notify_all();
  }
  if (worker.joinable())
    worker.join();
}

Stream *new_stream(int device) {
  static std::atomic<int> next_id{0};
  auto *s = new Stream;
  s->device = device;
  s->id = next_id++;
  Lock lock(g_mutex);
  g_streams.push_back(s);
  return s;
}

Stream *stream_of(aclrtStream handle) {
  if (handle)
    return static_cast<Stream *>(handle);
  int device = current_device();
  {
    Lock lock(g_mutex);
    auto found = g_default_streams.find(device);
    if (found != g_default_streams.end())
      return found->second;
  }
  Stream *s = new_stream(device);
  Lock lock(g_mutex);
  return g_default_streams.emplace(device, s).first->second;
}

std::vector<Stream *> all_streams() {
  Lock lock(g_mutex);
  return g_streams;
}

void wait_or_throw(Lock &lock, std::condition_variable &cv, const std::function<bool()> &ready,
                   const char *what) {
  auto end = Clock::now() + std::chrono::seconds(settings().wait_s);
  while (!cv.wait_for(lock, std::chrono::milliseconds(20), ready)) {
    if (t_device >= 0 && g_device_errors[t_device].code)
      throw std::runtime_error(std::string("aborted while waiting for ") + what);
    if (Clock::now() > end)
      throw std::runtime_error(std::string("timeout waiting for ") + what);
  }
}

// ---- launch

static aclError update_task(Stream *s, TaskKind kind, const char *name, Body body) {
  TaskGroup *group = s->update;
  size_t i = s->update_index++;
  if (kind != TaskKind::Kernel)
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "%s cannot be updated", name);
  if (i >= group->nodes.size())
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "task group has only %zu tasks",
                group->nodes.size());
  Graph *graph = group->graph;
  int index = group->nodes[i];
  const std::string &captured = graph->nodes[index].name;
  if (captured != name)
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "captured %s, update %s",
                captured.c_str(), name);
  // The replacement is itself a task of the update stream, so its order against an external event
  // recorded on that stream is real.
  auto replacement = std::make_shared<Body>(std::move(body));
  s->post([graph, index, replacement] {
    Lock lock(graph->mutex);
    graph->nodes[index].body = replacement;
  });
  return 0;
}

aclError launch(aclrtStream handle, TaskKind kind, const char *name, Body body) {
  Stream *s = stream_of(handle);
  if (settings().trace)
    fprintf(stderr, "[emu] device %d stream %d %s%s\n", s->device, s->id, name,
            s->graph    ? " (captured)"
            : s->update ? " (update)"
                        : "");
  if (s->update)
    return update_task(s, kind, name, std::move(body));
  if (s->graph) {
    if (s->group && kind != TaskKind::Kernel)
      return fail(ACL_ERROR_STREAM_TASK_GROUP_INTR, "%s inside a task group", name);
    s->graph->append(s, Node{kind, name, std::make_shared<Body>(std::move(body))});
    return 0;
  }
  if (aclError e = g_device_errors[s->device].report())
    return e;
  s->post(std::move(body));
  return 0;
}

}  // namespace emu

using namespace emu;

// ---- stream API

EMU_API aclError aclrtCreateStream(aclrtStream *out) {
  *out = new_stream(current_device());
  return 0;
}
EMU_API aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t, uint32_t) {
  return aclrtCreateStream(out);
}
EMU_API aclError aclrtDestroyStream(aclrtStream handle) {
  auto *s = static_cast<Stream *>(handle);
  s->synchronize(static_cast<int>(settings().wait_s * 1000));
  s->stop();
  Lock lock(g_mutex);
  g_streams.erase(std::remove(g_streams.begin(), g_streams.end(), s), g_streams.end());
  return 0;  // the object is leaked: captured graphs may still name it
}
EMU_API aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

EMU_API aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
  *id = stream_of(handle)->id;
  return 0;
}
EMU_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
EMU_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return 0; }
EMU_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) {
  return 0;
}

EMU_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  Stream *s = stream_of(handle);
  Lock lock(s->mutex);
  *status = s->queue.empty() && !s->busy ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

EMU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  Stream *s = stream_of(handle);
  if (s->graph) {
    s->graph->invalid = true;
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: synchronize not permitted",
                s->id);
  }
  if (aclError e = refuse_during_capture("aclrtSynchronizeStream"))
    return e;
  return s->synchronize(timeout_ms);
}
EMU_API aclError aclrtSynchronizeStream(aclrtStream handle) {
  return aclrtSynchronizeStreamWithTimeout(handle, -1);
}
EMU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  if (aclError e = refuse_during_capture("aclrtSynchronizeDevice"))
    return e;
  for (Stream *s : all_streams())
    if (s->device == t_device)
      if (aclError e = s->synchronize(timeout_ms))
        return e;
  return 0;
}
EMU_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

// ---- events

static void set_external(Event *e, bool value) {
  Lock lock(e->mutex);
  e->external_set = value;
  if (value) {
    e->timestamp_ms = now_ms();
    e->changed.notify_all();
  }
}
static void wait_external(Event *e) {
  Lock lock(e->mutex);
  wait_or_throw(lock, e->changed, [=] { return e->external_set; }, "external event");
}
static aclError refuse_captured(Event *e) {
  e->graph->invalid = true;
  return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event is captured");
}

EMU_API aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags) {
  auto *e = new Event;
  e->flags = flags;
  *out = e;
  return 0;
}
EMU_API aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flags) {
  return aclrtCreateEventWithFlag(out, flags);
}
EMU_API aclError aclrtCreateEvent(aclrtEvent *out) { return aclrtCreateEventWithFlag(out, 0); }
EMU_API aclError aclrtDestroyEvent(aclrtEvent) {
  return 0;  // leaked: graphs and queued tasks may still name it
}

EMU_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream handle) {
  auto *e = static_cast<Event *>(event);
  Stream *s = stream_of(handle);
  if (e->external())
    return launch(handle, TaskKind::ExternalTask, "event_record_external",
                  [e] { set_external(e, true); });
  if (s->graph) {
    e->graph = s->graph;
    e->graph_node = s->graph->append(s, Node{TaskKind::EventRecord, "event_record", nullptr});
    return 0;
  }
  uint64_t generation;
  {
    Lock lock(e->mutex);
    generation = ++e->submitted;
    e->graph = nullptr;
  }
  s->post([e, generation] {
    Lock lock(e->mutex);
    e->completed = generation;
    e->timestamp_ms = now_ms();
    e->changed.notify_all();
  });
  return 0;
}

EMU_API aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent event) {
  auto *e = static_cast<Event *>(event);
  Stream *s = stream_of(handle);
  if (e->external())
    return launch(handle, TaskKind::ExternalTask, "event_wait_external", [e] { wait_external(e); });
  if (e->captured()) {
    Graph *graph = e->graph;
    if (!s->graph) {  // the wait pulls this stream into the capture as a new lane
      s->graph = graph;
      graph->lanes.emplace(s, static_cast<int>(graph->lanes.size()));
    }
    if (s->graph != graph) {
      graph->invalid = true;
      return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "the event belongs to another capture");
    }
    Node node{TaskKind::EventWait, "event_wait", nullptr};
    node.waits_for = e->graph_node;
    graph->append(s, node);
    return 0;
  }
  if (s->graph) {
    s->graph->invalid = true;
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "capturing stream waits for an event recorded outside the capture");
  }
  uint64_t generation;
  {
    Lock lock(e->mutex);
    generation = e->submitted;
  }
  if (!generation)
    return 0;
  s->post([e, generation] {
    Lock lock(e->mutex);
    wait_or_throw(lock, e->changed, [=] { return e->completed >= generation; }, "event");
  });
  return 0;
}

EMU_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream handle) {
  auto *e = static_cast<Event *>(event);
  if (!e->external())
    return 0;
  return launch(handle, TaskKind::ExternalTask, "event_reset_external",
                [e] { set_external(e, false); });
}

EMU_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto *e = static_cast<Event *>(event);
  if (e->captured())
    return refuse_captured(e);
  Lock lock(e->mutex);
  uint64_t generation = e->submitted;
  e->changed.wait(lock,
                  [=] { return e->external() ? e->external_set : e->completed >= generation; });
  return 0;
}

EMU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  auto *e = static_cast<Event *>(event);
  if (e->captured())
    return refuse_captured(e);
  Lock lock(e->mutex);
  *status = e->completed >= e->submitted ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                         : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
EMU_API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
EMU_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent begin, aclrtEvent end) {
  *ms = static_cast<float>(static_cast<Event *>(end)->timestamp_ms -
                           static_cast<Event *>(begin)->timestamp_ms);
  return 0;
}
EMU_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *us) {
  *us = static_cast<uint64_t>(static_cast<Event *>(event)->timestamp_ms * 1000);
  return 0;
}

// ---- device-side value wait and write: what torch_npu 2.13 builds torch.npu.ExternalEvent on

static std::mutex g_value_mutex;
static std::condition_variable g_value_changed;

static bool value_matches(uint64_t x, uint64_t v, uint32_t condition) {
  switch (condition) {
  case ACL_STREAM_WAIT_VALUE_EQ:
    return x == v;
  case ACL_STREAM_WAIT_VALUE_GEQ:
    return static_cast<int64_t>(x - v) >= 0;
  case ACL_STREAM_WAIT_VALUE_AND:
    return (x & v) != 0;
  default:  // NOR
    return ~(x | v) != 0;
  }
}

EMU_API aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream stream) {
  return launch(stream, TaskKind::ExternalTask, "aclrtValueWrite", [=] {
    Lock lock(g_value_mutex);
    *static_cast<volatile uint64_t *>(accessible(address)) = value;
    g_value_changed.notify_all();
  });
}
EMU_API aclError aclrtValueWait(void *address, uint64_t value, uint32_t condition,
                                aclrtStream stream) {
  return launch(stream, TaskKind::ExternalTask, "aclrtValueWait", [=] {
    Lock lock(g_value_mutex);
    auto *word = static_cast<volatile uint64_t *>(accessible(address));
    wait_or_throw(
        lock, g_value_changed, [=] { return value_matches(*word, value, condition); },
        "aclrtValueWait");
  });
}

// ---- host callbacks

EMU_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
  return launch(stream, TaskKind::HostCallback, "aclrtLaunchHostFunc", [=] { function(argument); });
}

struct Callback {
  aclrtCallback function;
  void *argument;
  bool done = false;
};
static std::mutex g_callback_mutex;
static std::condition_variable g_callback_changed;
static std::deque<std::shared_ptr<Callback>> g_callbacks;

EMU_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return 0; }
EMU_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return 0; }

EMU_API aclError aclrtLaunchCallback(aclrtCallback function, void *argument,
                                     aclrtCallbackBlockType block, aclrtStream stream) {
  return launch(stream, TaskKind::HostCallback, "aclrtLaunchCallback", [=] {
    Lock lock(g_callback_mutex);
    auto callback = std::make_shared<Callback>(Callback{function, argument});
    g_callbacks.push_back(callback);
    g_callback_changed.notify_all();
    if (block == ACL_CALLBACK_BLOCK)
      wait_or_throw(lock, g_callback_changed, [=] { return callback->done; }, "host callback");
  });
}
EMU_API aclError aclrtProcessReport(int32_t timeout_ms) {
  Lock lock(g_callback_mutex);
  auto limit = std::chrono::milliseconds(timeout_ms < 0 ? 100 : timeout_ms);
  if (!g_callback_changed.wait_for(lock, limit, [] { return !g_callbacks.empty(); }))
    return ACL_ERROR_RT_REPORT_TIMEOUT;
  auto callback = g_callbacks.front();
  g_callbacks.pop_front();
  lock.unlock();
  callback->function(callback->argument);
  lock.lock();
  callback->done = true;
  g_callback_changed.notify_all();
  return 0;
}
