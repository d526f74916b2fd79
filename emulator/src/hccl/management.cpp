// The calls that create and destroy communicators, and the calls with which torch_npu queries them.
#include "hccl/domain.h"
#include "hccl/handles.h"
#include "hccl/meeting.h"
#include "runtime/faults.h"
#include "runtime/services.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

namespace emu::hccl {

static std::mutex known_mutex;
static std::map<std::pair<std::string, uint32_t>, std::weak_ptr<Communicator>> known;

void remember(const std::shared_ptr<Communicator> &communicator) {
  std::lock_guard<std::mutex> lock(known_mutex);
  std::erase_if(known, [](const auto &entry) { return entry.second.expired(); });
  known[{communicator->name, communicator->rank}] = communicator;
}
std::shared_ptr<Communicator> find(const std::string &name, uint32_t rank) {
  std::lock_guard<std::mutex> lock(known_mutex);
  auto found = known.find({name, rank});
  return found == known.end() ? nullptr : found->second.lock();
}

static void for_all_of(int device, const std::function<void(Communicator &)> &what) {
  std::vector<std::shared_ptr<Communicator>> found;
  {
    std::lock_guard<std::mutex> lock(known_mutex);
    for (auto &[name, weak] : known)
      if (auto comm = weak.lock(); comm && comm->device == device)
        found.push_back(comm);
  }
  for (auto &comm : found)
    what(*comm);
}

// When the tasks of a device are aborted, the device's communicators are suspended.
static int32_t follow_abort(int32_t device, aclrtDeviceTaskAbortStage stage, uint32_t, void *) {
  if (stage == ACL_RT_DEVICE_TASK_ABORT_PRE)
    for_all_of(device, [](Communicator &comm) { comm.suspend(); });
  else
    for_all_of(device, [](Communicator &comm) { comm.end_life(); });
  return 0;
}

uint32_t hccl_buffsize_mb() {
  const char *text = getenv("HCCL_BUFFSIZE");
  return text ? static_cast<uint32_t>(strtoul(text, nullptr, 10)) : 200;
}

static uint32_t buffer_mb(const HcclCommConfig *config) {
  if (config && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET)
    return config->hcclBufferSize;
  return hccl_buffsize_mb();
}

static HcclResult open(const HcclRootInfo &info, uint32_t ranks, uint32_t rank,
                       const HcclCommConfig *config, HcclComm *out) {
  static const aclError listens = aclrtSetDeviceTaskAbortCallback("HCCL", follow_abort, nullptr);
  if (listens)
    return HCCL_E_RUNTIME;
  int device = 0;
  if (open_domain(ranks, &device))
    return HCCL_E_RUNTIME;
  try {
    RootInfo root;
    memcpy(&root, info.internal, sizeof root);
    auto comm = std::make_shared<Communicator>(root, ranks, rank, device);
    comm->buffer_mb = buffer_mb(config);
    remember(comm);
    set_fault_identity(static_cast<int>(rank));
    *out = new Handle{comm};
    return HCCL_SUCCESS;
  } catch (const std::exception &e) {
    close_domain(ranks, device);
    fail(1, "%s", e.what());
    return HCCL_E_TIMEOUT;
  }
}

}  // namespace emu::hccl

using namespace emu;
using namespace emu::hccl;

EMU_API HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  try {
    RootInfo made = new_root();
    memset(root, 0, sizeof *root);
    memcpy(root->internal, &made, sizeof made);
    return HCCL_SUCCESS;
  } catch (const std::exception &e) {
    fail(1, "%s", e.what());
    return HCCL_E_TCP_CONNECT;
  }
}
EMU_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root, uint32_t rank,
                                        HcclComm *out) {
  return emu::hccl::open(*root, ranks, rank, nullptr, out);
}
EMU_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root,
                                              uint32_t rank, const HcclCommConfig *config,
                                              HcclComm *out) {
  return emu::hccl::open(*root, ranks, rank, config, out);
}
// A rank that is not a member makes this call without a list of members, and gets no communicator.
// The members exchange the root info through the parent communicator.
EMU_API HcclResult HcclCreateSubCommConfig(HcclComm *parent, uint32_t ranks, uint32_t *members,
                                           uint64_t, uint32_t rank, HcclCommConfig *config,
                                           HcclComm *out) {
  *out = nullptr;
  if (!members)
    return HCCL_SUCCESS;
  auto &over = communicator(*parent);
  HcclRootInfo root;
  if (HcclResult failed = rank == 0 ? HcclGetRootInfo(&root) : HCCL_SUCCESS)
    return failed;
  try {
    for (uint32_t r = 1; rank == 0 && r < ranks; r++)
      over->send(&root, sizeof root, members[r]);
    if (rank)
      over->receive(&root, sizeof root, members[0]);
  } catch (const std::exception &e) {
    fail(1, "%s", e.what());
    return HCCL_E_TIMEOUT;
  }
  return emu::hccl::open(root, ranks, rank, config, out);
}
// HCCL only checks that no call of the host uses the communicator. It frees the communicator even
// if tasks or graphs use it. In the emulator, the object exists as long as a task or a graph refers
// to it. But these tasks and graphs fail, and tasks that wait for peers end at once.
EMU_API HcclResult HcclCommDestroy(HcclComm comm) {
  const std::shared_ptr<Communicator> c = communicator(comm);
  if (c->calls) {
    fprintf(stderr, "[emulator] HcclCommDestroy: communicator %s is in use, try again\n",
            c->name.c_str());
    return HCCL_E_AGAIN;
  }
  if (int tasks = c->tasks)
    fprintf(stderr, "[emulator] HcclCommDestroy: %d tasks of communicator %s are queued or run; "
            "abort or synchronize first\n", tasks, c->name.c_str());
  if (int tasks = c->captured_tasks)
    fprintf(stderr, "[emulator] HcclCommDestroy: graphs hold %d tasks of communicator %s; drop "
            "them first\n", tasks, c->name.c_str());
  if (c->tasks || c->captured_tasks)
    count_careless_destroy(c->device);
  close_domain(c->ranks, c->device);
  c->is_destroyed = true;
  delete static_cast<Handle *>(comm);
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclCommSuspend(HcclComm comm) {
  communicator(comm)->suspend();
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclCommResume(HcclComm comm) {
  const auto &c = communicator(comm);
  if (fault_in_call("HcclCommResume", c->device))
    return HCCL_E_INTERNAL;
  try {
    c->resume();
    return HCCL_SUCCESS;
  } catch (const std::exception &e) {
    fail(1, "%s", e.what());
    return HCCL_E_INTERNAL;
  }
}
EMU_API HcclResult HcclGetCommName(HcclComm comm, char *name) {
  strncpy(name, communicator(comm)->name.c_str(), 127);
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
  *ranks = communicator(comm)->ranks;
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
  *rank = communicator(comm)->rank;
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
EMU_API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
EMU_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *result) {
  *result = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
EMU_API const char *HcclGetErrorString(HcclResult) { return "HCCL error"; }
