#include "runtime/task_groups.h"

#include "rates.h"
#include "runtime/timeline.h"
#include "runtime/counters.h"

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <cstring>

namespace emu {

// Callers may keep a handle after its graph was destroyed. So a handle is dereferenced only if its
// graph exists.
static std::mutex g_groups_mutex;
static std::map<TaskGroup *, std::weak_ptr<Graph>> g_groups;

static std::shared_ptr<Graph> graph_of_group(aclrtTaskGrp handle) {
  Lock lock(g_groups_mutex);
  auto found = g_groups.find(static_cast<TaskGroup *>(handle));
  if (found == g_groups.end())
    return nullptr;
  auto graph = found->second.lock();
  if (!graph)
    g_groups.erase(found);
  return graph;
}

static void remember(TaskGroup *group, const std::shared_ptr<Graph> &graph) {
  Lock lock(g_groups_mutex);
  for (auto g = g_groups.begin(); g != g_groups.end();)
    g = g->second.expired() ? g_groups.erase(g) : std::next(g);
  g_groups[group] = graph;
}

// Returns how long the host needs for an update, with modelled time.
static int64_t update_ns(const char *name) {
  bool is_attention = strncmp(name, "aclnnFusedInferAttention", 24) == 0;
  return microseconds(is_attention ? rates().update_attention_us : rates().update_us);
}

aclError update_task(Stream *s, TaskKind kind, const char *name, Task body) {
  size_t i = s->update_index++;
  if (kind != TaskKind::Kernel)
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "%s cannot be updated", name);
  if (i >= s->update->nodes.size())
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "task group has only %zu tasks",
                s->update->nodes.size());
  auto graph = s->update_graph;
  const Node &node = graph->nodes[s->update->nodes[i]];
  if (strcmp(node.name, name))
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "captured %s, update %s", node.name,
                name);
  // A task on the update stream replaces the body. So the replacement is ordered with the external
  // events that are recorded on this stream.
  auto replacement = std::make_shared<const Task>(std::move(body));
  UpdatableBody *target = node.updatable.get();
  s->update_ends_ns += update_ns(name);
  s->post("task_update", [graph, target, replacement]() mutable {
    if (t_timeline)
      t_timeline->pass(microseconds(rates().event_us), Idle::Update);
    count(Counters::of(graph->device).task_updates);
    Lock lock(target->mutex);
    target->task.swap(replacement);
  });
  return 0;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Stream *s = stream_of(handle);
  Lock lock(g_capture_mutex);
  if (!s->graph || s->group)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "task group begin: stream %d is not capturing or has an open group", s->id);
  s->graph->groups.push_back(std::make_unique<TaskGroup>());
  s->group = s->graph->groups.back().get();
  remember(s->group, s->graph);
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
  Stream *s = stream_of(handle);
  Lock lock(g_capture_mutex);
  if (!s->group)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open");
  *group = s->group;
  s->group = nullptr;
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  Stream *s = stream_of(handle);
  Lock lock(g_capture_mutex);
  if (s->update || s->graph)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "task update begin: stream %d is capturing or in another update", s->id);
  s->update_graph = graph_of_group(group);
  if (!s->update_graph)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "task update begin: the graph of the task group was destroyed");
  s->update = static_cast<TaskGroup *>(group);
  s->update_index = 0;
  s->update_ends_ns = host_ns(s->device);
  return 0;
}
EMU_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  Stream *s = stream_of(handle);
  if (settings().timed)
    host_works_until(s->device, s->update_ends_ns);
  Lock lock(g_capture_mutex);
  if (!s->update)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task update is open");
  size_t expected = s->update->nodes.size();
  s->update = nullptr;
  s->update_graph.reset();
  if (s->update_index != expected)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "updated %zu of %zu tasks", s->update_index,
                expected);
  return 0;
}
