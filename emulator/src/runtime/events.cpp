// Events. There are three kinds: ordinary events, captured events (edges of a graph), and external
// events.
#include "runtime/counters.h"
#include "runtime/graph.h"
#include "runtime/objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

namespace emu {

constexpr uint32_t kEventsPerDevice = 65536;
static std::atomic<uint32_t> g_next_event_id{0}, g_live_events{0};

Event::Event(uint32_t flags_) : id(g_next_event_id++), flags(flags_) { g_live_events++; }
Event::~Event() { g_live_events--; }

std::shared_ptr<Graph> Event::capture() const {
  auto g = graph.lock();
  return g && g->capturing ? g : nullptr;
}

std::string Event::name() const {
  return "event " + std::to_string(id) +
         (recorded_on >= 0 ? " (recorded on stream " + std::to_string(recorded_on) + ")"
                           : " (not recorded yet)");
}

static std::shared_ptr<Event> event_of(aclrtEvent handle) {
  return static_cast<Event *>(handle)->self;
}

// Returns the time of the task that this worker runs: the modelled time of its stream, or the time
// of the host's clock.
static int64_t time_of_task() { return t_timeline ? t_timeline->ns() : now_ns(); }

static void set_external(Event &e, bool value) {
  Lock lock(e.mutex);
  e.external_set = value;
  if (value) {
    e.timestamp_ns = time_of_task();
    e.changed.notify_all();
  }
}
// If the host queries a captured event, the query is refused until the capture has ended. Queries
// of an external event are always refused (api_error.cc: EventSynchronize, EventQueryStatus and
// similar functions).
static aclError refuse_question(const Event &e, const char *question) {
  if (e.external())
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s of an external event is not supported",
                question);
  Lock lock(g_capture_mutex);
  if (e.capture())
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "%s: event %u is captured", question, e.id);
  return 0;
}

static int64_t timestamp_ns(aclrtEvent event) {
  auto *e = static_cast<Event *>(event);
  pay_host_time(e->device);
  Lock lock(e->mutex);
  return e->timestamp_ns;
}

static aclError record_captured(const std::shared_ptr<Event> &e, Stream *s) {
  e->graph = s->graph;
  return s->graph->append(s, {TaskKind::EventRecord, "event_record", nullptr}, &e->graph_node);
}

static void post_record(const std::shared_ptr<Event> &e, Stream *s) {
  uint64_t generation;
  auto moment = std::make_shared<int64_t>(0);
  {
    Lock lock(e->mutex);
    generation = ++e->submitted;
    e->moment = moment;
    e->device = s->device;
    e->aborts = g_failures[s->device].aborts;
  }
  e->recorded_on = s->id;
  e->graph.reset();
  s->post("event_record", [e, generation, moment] {
    Lock lock(e->mutex);
    e->completed = generation;
    e->timestamp_ns = *moment = time_of_task();
    e->changed.notify_all();
  });
}

// If the waiting stream is not captured yet, the wait adds it to the capture as a new lane.
static aclError wait_captured(const std::shared_ptr<Event> &e, const std::shared_ptr<Graph> &graph,
                              Stream *s) {
  if (!s->graph)
    if (aclError error = graph->add_lane(s))
      return error;
  if (s->graph != graph) {
    graph->invalid = true;
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "the event belongs to another capture");
  }
  Node node{TaskKind::EventWait, "event_wait", nullptr};
  node.waits_for = e->graph_node;
  return graph->append(s, std::move(node));
}

static void post_wait(const std::shared_ptr<Event> &e, Stream *s) {
  uint64_t generation;
  std::shared_ptr<int64_t> moment;
  {
    Lock lock(e->mutex);
    generation = e->submitted;
    moment = e->moment;
    if (e->is_over(generation) && !settings().timed)
      return;
  }
  s->post("event_wait", [e, generation, moment] {
    Lock lock(e->mutex);
    wait_or_throw(
        lock, e->changed, [&] { return e->is_over(generation); }, [&] { return e->name(); });
    if (t_timeline)
      t_timeline->wait_until(*moment, Idle::Event);
  });
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags) {
  auto e = std::make_shared<Event>(flags);
  e->self = e;
  *out = e.get();
  return 0;
}
EMU_API aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flags) {
  return aclrtCreateEventWithFlag(out, flags);
}
EMU_API aclError aclrtCreateEvent(aclrtEvent *out) { return aclrtCreateEventWithFlag(out, 0); }
EMU_API aclError aclrtDestroyEvent(aclrtEvent event) {
  auto last = std::move(static_cast<Event *>(event)->self);
  return 0;  // the event is freed here, or with the last task that refers to it
}
EMU_API aclError aclrtGetEventAvailNum(uint32_t *count) {
  *count = kEventsPerDevice - g_live_events;
  return 0;
}

EMU_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream handle) {
  auto e = event_of(event);
  Stream *s = stream_of(handle);
  if (e->external()) {
    e->recorded_on = s->id;
    return launch(handle, TaskKind::ExternalTask, "event_record_external",
                  [e] { set_external(*e, true); });
  }
  Lock lock(g_capture_mutex);
  if (s->graph)
    return record_captured(e, s);
  if (aclError error = g_failures[s->device].report())
    return error;
  post_record(e, s);
  return 0;
}

EMU_API aclError aclrtStreamWaitEvent(aclrtStream handle, aclrtEvent event) {
  auto e = event_of(event);
  Stream *s = stream_of(handle);
  if (e->external())
    return launch(handle, TaskKind::ExternalTask, "event_wait_external",
                  [e, device = s->device, captured = s->captured()] {
      ExternalWait counted(device, captured);
      Lock lock(e->mutex);
      wait_or_throw(
          lock, e->changed, [&] { return e->external_set; },
          [&] { return "external " + e->name(); });
      if (t_timeline)
        counted.modelled(t_timeline->wait_until(e->timestamp_ns, Idle::External));
    });
  Lock lock(g_capture_mutex);
  if (auto graph = e->capture())
    return wait_captured(e, graph, s);
  if (s->graph) {
    s->graph->invalid = true;
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "capturing stream %d waits for %s recorded outside the capture", s->id,
                e->name().c_str());
  }
  if (e->submitted)
    post_wait(e, s);
  return 0;
}

EMU_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream handle) {
  auto e = event_of(event);
  if (!e->external())
    return 0;
  return launch(handle, TaskKind::ExternalTask, "event_reset_external",
                [e] { set_external(*e, false); });
}

EMU_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto e = event_of(event);
  if (aclError error = refuse_question(*e, "synchronize"))
    return error;
  count(Counters::of(current_device()).host_syncs);
  pay_host_time(e->device);
  Lock lock(e->mutex);
  uint64_t generation = e->submitted;
  auto moment = e->moment;
  auto done = [&] { return e->completed >= generation; };
  uint32_t aborts = e->aborts;
  if (g_failures[e->device].aborts != aborts)
    return 0;  // the record was removed, and nothing waits for it
  // If the device has failed, the event never completes, because tasks after the failed task do not
  // run.
  while (!e->changed.wait_for(lock, std::chrono::milliseconds(20), done))
    if (aclError error = g_failures[e->device].report_since(aborts))
      return error;
  lock.unlock();
  return settings().timed ? sleep_with_device(e->device, *moment, aborts) : 0;
}

EMU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  auto e = event_of(event);
  if (aclError error = refuse_question(*e, "query"))
    return error;
  Lock lock(e->mutex);
  bool is_complete =
      e->is_over(e->submitted) && (!settings().timed || *e->moment <= host_ns(e->device));
  lock.unlock();
  if (is_complete)
    pay_host_time(e->device);
  *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
EMU_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  if (aclError error = refuse_question(*event_of(event), "query of waits"))
    return error;
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
EMU_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent begin, aclrtEvent end) {
  for (aclrtEvent event : {begin, end})
    if (aclError error = refuse_question(*event_of(event), "elapsed time"))
      return error;
  *ms = static_cast<float>((timestamp_ns(end) - timestamp_ns(begin)) / 1e6);
  return 0;
}
EMU_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *us) {
  if (aclError error = refuse_question(*event_of(event), "timestamp"))
    return error;
  *us = static_cast<uint64_t>(timestamp_ns(event) / 1000);
  return 0;
}
