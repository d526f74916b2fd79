// The aclmdlRI calls, which capture, execute and destroy graphs. This file also decides whether a
// launch is queued on a stream or recorded into a graph.
#include "runtime/counters.h"
#include "runtime/faults.h"
#include "runtime/graph.h"
#include "runtime/queue_pool.h"
#include "runtime/task_groups.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstdio>

#include <unistd.h>

namespace emu {

std::mutex g_capture_mutex;
static std::vector<std::shared_ptr<Graph>> g_capturing;

static Graph *graph_of(aclmdlRI model) { return static_cast<Graph *>(model); }

bool is_capturing(int device) {
  Lock lock(g_capture_mutex);
  return std::any_of(g_capturing.begin(), g_capturing.end(),
                     [device](auto &g) { return g->device == device; });
}

aclError refuse_during_capture(const char *call) {
  Lock lock(g_capture_mutex);
  for (auto &g : g_capturing) {
    if (g->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED ||
        t_capture_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
      continue;
    if (g->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL &&
        g->capturing_thread != std::this_thread::get_id())
      continue;
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                "%s is not permitted while a stream is capturing", call);
  }
  return 0;
}

// Returns a body that runs `body` and counts its runs.
static Task counted(Task body, int device, LaunchTraits traits) {
  if (!traits.ai_cpu && !traits.unaligned)
    return body;
  return [body = std::move(body), device, traits] {
    count_traits(device, traits);
    body();
  };
}

aclError launch(aclrtStream handle, TaskKind kind, const char *name, Task body,
                LaunchTraits traits) {
  Stream *s = stream_of(handle);
  // A fault may sleep, so it is executed before the mutex is locked.
  aclError fault = s->captured() ? fault_in_capture(name, s->device) : 0;
  body = counted(watched(with_fault(name, s->device, traits, std::move(body))), s->device, traits);
  if (settings().timed)
    body = on_clock(kind, traits, std::move(body));
  {
    Lock lock(g_capture_mutex);
    if (settings().trace)
      fprintf(stderr, "[emulator] device %d stream %d %s%s\n", s->device, s->id, name,
              s->graph    ? " (captured)"
              : s->update ? " (update)"
                          : "");
    if (s->update)
      return update_task(s, kind, name, std::move(body));
    if (s->graph) {
      if (s->group && kind != TaskKind::Kernel)
        return fail(ACL_ERROR_STREAM_TASK_GROUP_INTR, "%s inside a task group", name);
      if (fault) {
        s->graph->invalid = true;
        return fault;
      }
      Node node{kind, name, std::move(body)};
      node.ai_cpu = traits.ai_cpu != nullptr;
      return s->graph->append(s, std::move(node));
    }
  }
  if (aclError e = g_failures[s->device].report())
    return e;
  s->post(name, std::move(body));
  return 0;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  Stream *s = stream_of(handle);
  Lock lock(g_capture_mutex);
  if (s->graph)
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is already capturing", s->id);
  auto g = std::make_shared<Graph>(s, mode);
  if (aclError e = g->add_lane(s))
    return e;
  g->self = g;
  g_capturing.push_back(g);
  return 0;
}

EMU_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status,
                                        aclmdlRI *model) {
  Stream *s = stream_of(handle);
  Lock lock(g_capture_mutex);
  Graph *g = s->graph.get();
  *status = !g           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : g->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                         : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model)
    *model = g;
  return 0;
}

EMU_API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
  Stream *s = stream_of(handle);
  *model = nullptr;
  Lock lock(g_capture_mutex);
  auto g = s->graph;
  if (!g)
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "stream %d is not capturing", s->id);
  if (g->origin != s)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream");
  g->end_capture();
  g_capturing.erase(std::remove(g_capturing.begin(), g_capturing.end(), g), g_capturing.end());
  aclError error = 0;
  if (g->invalid)
    error = fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated");
  else if (g->has_unjoined_lane())
    error = fail(ACL_ERROR_RT_STREAM_UNJOINED,
                 "a forked stream was not joined to the capture's origin stream");
  if (error) {  // the caller gets no handle that it could destroy, so no object may remain
    g->release_streams();
    g->self.reset();
    return error;
  }
  count(Counters::of(g->device).graphs);
  count(Counters::of(g->device).ai_cpu_captured, g->ai_cpu_tasks());
  *model = g.get();
  return 0;
}

EMU_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  std::swap(*mode, t_capture_mode);
  return 0;
}

EMU_API aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
  *id = graph_of(model)->id;
  return 0;
}

// If `streams` is null, only the number of streams is returned. The returned handles only identify
// the streams of the graph.
EMU_API aclError aclmdlRIGetStreams(aclmdlRI model, aclrtStream *streams, uint32_t *count) {
  Graph *g = graph_of(model);
  auto number = static_cast<uint32_t>(g->stream_count());
  if (streams)
    for (uint32_t i = 0; i < std::min(*count, number); i++)
      streams[i] = reinterpret_cast<char *>(g) + i;
  *count = number;
  return 0;
}

EMU_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  auto g = graph_of(model)->shared_from_this();
  if (settings().software_sq)
    if (aclError e = QueuePool::of(g->device).bind(*g))
      return e;
  g->in_flight++;
  // The count decreases when the task is freed, even if the task never ran.
  std::shared_ptr<void> flight(nullptr, [g](void *) { g->in_flight--; });
  return launch(stream, TaskKind::GraphLaunch, "aclmdlRIExecute",
                [g, flight = std::move(flight)] { g->replay(); });
}

EMU_API aclError aclmdlRIDestroy(aclmdlRI model) {
  auto g = graph_of(model)->shared_from_this();
  auto end = Clock::now() + std::chrono::seconds(settings().wait_s);
  while (g->in_flight && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  g->release_streams();
  count(Counters::of(g->device).graphs, -1);
  count(Counters::of(g->device).ai_cpu_captured, -g->ai_cpu_tasks());
  g->self.reset();
  return 0;  // freed here, or with the last update task that refers to it
}

static const char *task_type(const Node &node) {
  switch (node.kind) {
  case TaskKind::Kernel:
    return node.ai_cpu ? "KERNEL_AICPU" : "KERNEL_AICORE";
  case TaskKind::Copy:
    return "MEMCPY_ASYNC";
  case TaskKind::HostCallback:
    return "HOSTFUNC_CALLBACK";
  case TaskKind::EventRecord:
    return "EVENT_RECORD";
  case TaskKind::EventWait:
    return "EVENT_WAIT";
  default:
    return "WRITE_VALUE";
  }
}

// Like stream.cc of the runtime, prints one line per task, in the order of the capture. Each task
// takes one unit of time.
EMU_API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char *path, uint32_t) {
  Graph *g = graph_of(model);
  FILE *file = fopen(path, "w");
  if (!file)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "cannot write %s", path);
  fprintf(file, "[\n");
  for (size_t i = 0; i < g->nodes.size(); i++) {
    const Node &node = g->nodes[i];
    fprintf(file,
            "{\"name\":\"%s\",\"pid\":\"%d aclGraph\",\"tid\":\"stream%d\",\"ts\":%zu,\"dur\":1,"
            "\"ph\":\"X\",\"args\":{\"Model Id\":%u,\"Stream Id\":%d,\"Task Id\":%zu,"
            "\"Task Type\":\"%s\"}}%s\n",
            node.name, getpid(), node.lane, i, g->id, node.lane, i, task_type(node),
            i + 1 < g->nodes.size() ? "," : "");
  }
  fprintf(file, "]\n");
  fclose(file);
  return 0;
}
