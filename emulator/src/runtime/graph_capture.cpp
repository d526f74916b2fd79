// Graph capture, replay and task-group updates (the aclmdlRI* calls).
#include "runtime_objects.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace emu {

int Graph::append(Stream *stream, Node node) {
  node.lane = lanes.at(stream);
  nodes.push_back(std::move(node));
  int index = static_cast<int>(nodes.size()) - 1;
  if (stream->group)
    stream->group->nodes.push_back(index);
  return index;
}

void Graph::run_node(int index) {
  std::shared_ptr<Body> body;
  {
    Lock lock(mutex);
    body = nodes[index].body;
  }
  if (body)
    (*body)();
}

// Each lane (captured stream) runs in its own thread; the captured event edges order them.
void Graph::replay() {
  int count = static_cast<int>(nodes.size());
  if (lanes.size() == 1) {
    for (int i = 0; i < count; i++)
      run_node(i);
    return;
  }
  std::vector<char> recorded(count, 0);
  std::mutex replay_mutex;
  std::condition_variable changed;
  std::string error;
  auto run_lane = [&](int lane) {
    t_device = device;
    try {
      for (int i = 0; i < count; i++) {
        const Node &node = nodes[i];
        if (node.lane != lane)
          continue;
        if (node.kind == TaskKind::EventRecord) {
          Lock lock(replay_mutex);
          recorded[i] = 1;
          changed.notify_all();
        } else if (node.kind == TaskKind::EventWait) {
          Lock lock(replay_mutex);
          wait_or_throw(
              lock, changed, [&] { return recorded[node.waits_for] || !error.empty(); },
              "a graph edge");
          if (!error.empty())
            return;
        } else {
          run_node(i);
        }
      }
    } catch (const std::exception &e) {
      Lock lock(replay_mutex);
      if (error.empty())
        error = e.what();
      changed.notify_all();
    }
  };
  std::vector<std::thread> others;
  for (size_t lane = 1; lane < lanes.size(); lane++)
    others.emplace_back(run_lane, static_cast<int>(lane));
  run_lane(0);
  for (std::thread &t : others)
    t.join();
  if (!error.empty())
    throw std::runtime_error(error);
}

aclError refuse_during_capture(const char *call) {
  Lock lock(g_mutex);
  for (Graph *g : g_capturing) {
    if (g->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED ||
        t_capture_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
      continue;
    if (g->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL &&
        g->capturing_thread != std::this_thread::get_id())
      continue;
    g->invalid = true;
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                "%s is not permitted while a stream is capturing", call);
  }
  return 0;
}

// True if some forked stream was not joined: its last node is not a record that another lane waits
// for.
static bool has_unjoined_lane(const Graph &g) {
  std::vector<int> last(g.lanes.size(), -1);
  std::vector<char> joined(g.nodes.size(), 0);
  for (size_t i = 0; i < g.nodes.size(); i++) {
    last[g.nodes[i].lane] = static_cast<int>(i);
    if (g.nodes[i].kind == TaskKind::EventWait)
      joined[g.nodes[i].waits_for] = 1;
  }
  for (size_t lane = 1; lane < last.size(); lane++) {
    int i = last[lane];
    if (i >= 0 && !(g.nodes[i].kind == TaskKind::EventRecord && joined[i]))
      return true;
  }
  return false;
}

}  // namespace emu

using namespace emu;

// ---- capture

EMU_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  static std::atomic<uint32_t> next_id{1};
  Stream *s = stream_of(handle);
  if (s->graph)
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is already capturing", s->id);
  Lock lock(g_mutex);
  if (g_held_streams[s->device] + 1 > static_cast<long>(settings().streams))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                "no stream resource: %ld of %ld streams of device %d are held by captured graphs",
                g_held_streams[s->device], static_cast<long>(settings().streams), s->device);
  auto *g = new Graph;
  g->id = next_id++;
  g->device = s->device;
  g->origin = s;
  g->mode = mode;
  g->capturing_thread = std::this_thread::get_id();
  g->lanes[s] = 0;
  s->graph = g;
  g_capturing.push_back(g);
  return 0;
}

EMU_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status,
                                        aclmdlRI *model) {
  Graph *g = stream_of(handle)->graph;
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
  Graph *g = s->graph;
  if (!g)
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "stream %d is not capturing", s->id);
  if (g->origin != s)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream");
  for (auto &[stream, lane] : g->lanes) {
    stream->graph = nullptr;
    stream->group = nullptr;
  }
  g->capturing = false;
  {
    Lock lock(g_mutex);
    g_capturing.erase(std::remove(g_capturing.begin(), g_capturing.end(), g), g_capturing.end());
    g->held_streams = static_cast<long>(g->lanes.size());
    g_held_streams[g->device] += g->held_streams;
  }
  *model = g;
  if (g->invalid)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated");
  if (has_unjoined_lane(*g))
    return fail(ACL_ERROR_RT_STREAM_UNJOINED,
                "a forked stream was not joined to the capture's origin stream");
  return 0;
}

EMU_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  std::swap(*mode, t_capture_mode);
  return 0;
}

// ---- replay

EMU_API aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
  *id = static_cast<Graph *>(model)->id;
  return 0;
}
EMU_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  auto *g = static_cast<Graph *>(model);
  return launch(stream, TaskKind::GraphLaunch, "aclmdlRIExecute", [g] { g->replay(); });
}
EMU_API aclError aclmdlRIDestroy(aclmdlRI model) {
  auto *g = static_cast<Graph *>(model);
  for (Stream *s : all_streams())
    s->synchronize();
  Lock lock(g_mutex);
  g_held_streams[g->device] -= g->held_streams;
  g->nodes.clear();
  return 0;  // the object is leaked: events may still name it
}

EMU_API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char *path, uint32_t) {
  auto *g = static_cast<Graph *>(model);
  FILE *file = fopen(path, "w");
  if (!file)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "cannot write %s", path);
  fprintf(file, "[");
  for (size_t i = 0; i < g->nodes.size(); i++)
    fprintf(file, "%s{\"task\":%zu,\"name\":\"%s\",\"stream\":%d}", i ? ",\n" : "", i,
            g->nodes[i].name.c_str(), g->nodes[i].lane);
  fprintf(file, "]\n");
  fclose(file);
  return 0;
}

// ---- task groups

EMU_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Stream *s = stream_of(handle);
  if (!s->graph || s->group)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "task group begin: stream %d is not capturing or has an open group", s->id);
  s->graph->groups.emplace_back(new TaskGroup{s->graph, {}});
  s->group = s->graph->groups.back().get();
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
  Stream *s = stream_of(handle);
  if (!s->group)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open");
  *group = s->group;
  s->group = nullptr;
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  Stream *s = stream_of(handle);
  if (s->update || s->graph)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "task update begin: stream %d is capturing or in another update", s->id);
  s->update = static_cast<TaskGroup *>(group);
  s->update_index = 0;
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  Stream *s = stream_of(handle);
  if (!s->update)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task update is open");
  size_t expected = s->update->nodes.size();
  s->update = nullptr;
  if (s->update_index != expected)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "updated %zu of %zu tasks", s->update_index,
                expected);
  return 0;
}
