#include "hccl/point_to_point.h"

#include "hccl/cost.h"
#include "hccl/reduce.h"
#include "runtime/services.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

using namespace emu;
using namespace emu::hccl;

// Returns an object that counts as a user of the communicator as long as the object exists.
static std::shared_ptr<void> count_in(const Comm &c, std::atomic<int> &users) {
  users++;
  return {nullptr, [c, &users](void *) { users--; }};
}

HcclResult emu::hccl::launch_on(const Comm &c, const char *name, aclrtStream stream, size_t bytes,
                                int64_t ns, Task body) {
  auto call = count_in(c, c->calls);
  if (!c->claim(Communicator::Use::Collectives)) {
    return fail(1,
                "%s on communicator %s, which operators use that communicate inside their kernel "
                "(MC2): they need one of their own",
                name, c->name.c_str())
               ? HCCL_E_NOT_SUPPORT
               : HCCL_SUCCESS;
  }
  if (c->is_suspended())
    return fail(HCCL_E_SUSPENDING, "%s: communicator %s is suspended", name, c->name.c_str())
               ? HCCL_E_SUSPENDING
               : HCCL_SUCCESS;
  if (use_domain(stream, c.get()))
    return HCCL_E_RUNTIME;
  // The task owns `user`. So the number of users also falls if the task is destroyed without having
  // run.
  bool is_captured = graph_of_capture(stream) != 0;
  auto user = count_in(c, is_captured ? c->captured_tasks : c->tasks);
  auto counted = [c, bytes, is_captured, user, body = std::move(body)] {
    auto replay = is_captured ? count_in(c, c->tasks) : nullptr;
    c->check_usable();
    body();
    count_collective(c->device, bytes);
  };
  LaunchTraits traits;
  traits.ns = ns;
  return launch(stream, TaskKind::Kernel, name, std::move(counted), traits) ? HCCL_E_RUNTIME
                                                                           : HCCL_SUCCESS;
}

static std::vector<Transfer> of_peer(const std::vector<Transfer> &all, uint32_t peer) {
  std::vector<Transfer> found;
  for (const Transfer &t : all)
    if (t.peer == peer)
      found.push_back(t);
  return found;
}

static void copy_to_itself(const std::vector<Transfer> &sends,
                           const std::vector<Transfer> &receives) {
  if (sends.size() != receives.size())
    throw std::runtime_error("HCCL mismatch: a rank sends " + std::to_string(sends.size()) +
                             " messages to itself and receives " +
                             std::to_string(receives.size()));
  for (size_t i = 0; i < sends.size(); i++) {
    if (sends[i].bytes != receives[i].bytes)
      throw std::runtime_error("HCCL mismatch: a rank sends itself " +
                               std::to_string(sends[i].bytes) + " bytes and receives " +
                               std::to_string(receives[i].bytes));
    memcpy(receives[i].at, sends[i].at, sends[i].bytes);
  }
}

// The pairs of ranks take turns. Both ranks of a pair take the same turn, and one rank sends while
// the other receives. So ranks never wait for each other in a ring.
void emu::hccl::exchange(Communicator &c, const Transfers &mine) {
  std::lock_guard<std::mutex> in_order(c.order());
  for (uint32_t step = 0; step < c.ranks; step++) {
    uint32_t peer = (step + c.ranks - c.rank) % c.ranks;
    auto sends = of_peer(mine.sends, peer), receives = of_peer(mine.receives, peer);
    if (peer == c.rank) {
      copy_to_itself(sends, receives);
      continue;
    }
    auto send = [&] {
      for (const Transfer &t : sends)
        c.send(t.at, t.bytes, peer);
    };
    if (c.rank < peer)
      send();
    for (const Transfer &t : receives)
      c.receive(t.at, t.bytes, peer);
    if (c.rank > peer)
      send();
  }
}

int64_t emu::hccl::exchange_ns(const Communicator &c, const Transfers &mine) {
  size_t sent = 0;
  for (const Transfer &t : mine.sends)
    sent += t.peer == c.rank ? 0 : t.bytes;
  size_t most = std::max(sent, bytes_from_others(c, mine));
  return operation_ns(Pattern::AllToAll, most / std::max(c.ranks - 1, 1u), c);
}

size_t emu::hccl::bytes_from_others(const Communicator &c, const Transfers &mine) {
  size_t bytes = 0;
  for (const Transfer &t : mine.receives)
    bytes += t.peer == c.rank ? 0 : t.bytes;
  return bytes;
}

static HcclResult launch_exchange(const Comm &c, aclrtStream stream, const char *name,
                                  const Transfers &mine) {
  return launch_on(c, name, stream, bytes_from_others(*c, mine), exchange_ns(*c, mine),
                   [=] { exchange(*c, mine); });
}

// The sends and receives that a thread calls between HcclGroupStart and HcclGroupEnd. The outermost
// HcclGroupEnd launches all calls of the same communicator and stream as a single task. So
// different ranks may make these calls in different orders.
namespace {
struct Batch {
  Comm comm;
  aclrtStream stream;
  Transfers mine;
};
struct Group {
  int depth = 0;
  std::vector<Batch> batches;
};
}  // namespace
static thread_local Group t_group;

// Null outside of a group.
static Transfers *transfers_of_group(const Comm &c, aclrtStream stream) {
  if (!t_group.depth)
    return nullptr;
  for (Batch &batch : t_group.batches)
    if (batch.comm == c && batch.stream == stream)
      return &batch.mine;
  t_group.batches.push_back({c, stream, {}});
  return &t_group.batches.back().mine;
}

EMU_API HcclResult HcclGroupStart() {
  t_group.depth++;
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGroupEnd() {
  if (!t_group.depth) {
    fail(1, "HcclGroupEnd without HcclGroupStart");
    return HCCL_E_PARA;
  }
  if (--t_group.depth)
    return HCCL_SUCCESS;
  HcclResult result = HCCL_SUCCESS;
  for (const Batch &batch : std::exchange(t_group.batches, {}))
    if (HcclResult failed = launch_exchange(batch.comm, batch.stream, "HcclGroupEnd", batch.mine))
      result = failed;
  return result;
}

EMU_API HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t to,
                            HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  if (Transfers *group = transfers_of_group(c, stream)) {
    group->sends.push_back({to, bytes_at(data), bytes});
    return HCCL_SUCCESS;
  }
  return launch_on(c, "HcclSend", stream, 0, operation_ns(Pattern::Pair, bytes, *c),
                   [=] { c->send(data, bytes, to); });
}

EMU_API HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t from,
                            HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  if (Transfers *group = transfers_of_group(c, stream)) {
    group->receives.push_back({from, bytes_at(data), bytes});
    return HCCL_SUCCESS;
  }
  return launch_on(c, "HcclRecv", stream, bytes, operation_ns(Pattern::Pair, bytes, *c),
                   [=] { c->receive(data, bytes, from); });
}

EMU_API HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm,
                                     aclrtStream stream) {
  Transfers mine;
  for (HcclSendRecvItem *i = items; i < items + count; i++)
    (i->sendRecvType == HCCL_SEND ? mine.sends : mine.receives)
        .push_back({i->remoteRank, bytes_at(i->buf), i->count * element_bytes(i->dataType)});
  return launch_exchange(communicator(comm), stream, "HcclBatchSendRecv", mine);
}
