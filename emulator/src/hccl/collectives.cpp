// The collectives. Each collective is one task of the stream, so it can be captured like any task.
#include "hccl/cost.h"
#include "hccl/domain.h"
#include "hccl/point_to_point.h"
#include "hccl/reduce.h"
#include "runtime/services.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

using namespace emu;
using namespace emu::hccl;

namespace {

Call describe(const char *name, uint64_t count, int type, int argument = 0) {
  Call call{};
  snprintf(call.text, sizeof call.text, "%s count=%llu dtype=%d arg=%d", name,
           static_cast<unsigned long long>(count), type, argument);
  return call;
}

// Launches an operation of all ranks. The ranks compare `call`. If the operation is captured, the
// session of the capture is added to `call`. `bytes` is the number of bytes that this rank gets
// from other ranks; each byte counts once. With modelled time, the operation takes `ns`.
template <class Body>
HcclResult launch_for_all(const Comm &c, const char *name, Call call, aclrtStream stream,
                          size_t bytes, int64_t ns, Body body) {
  uint32_t graph = graph_of_capture(stream);
  auto session = graph ? c->sessions().of(graph, c) : nullptr;
  call.session = session ? session->number : 0;
  return launch_on(c, name, stream, bytes, ns, [call, session, body = std::move(body)] {
    if (session)
      session->replayed();
    body(call);
  });
}

// Every rank offers the same number of bytes. `consume(begin, bytes, parts)` gets one range of
// these bytes from all ranks. It is called once if all bytes fit into a slot, and otherwise once
// for each chunk.
template <class Consume>
void all_to_each(Communicator &c, const Call &call, const char *offer, size_t bytes,
                 Consume consume) {
  std::lock_guard<std::mutex> in_order(c.order());
  std::vector<const char *> parts(c.ranks);
  if (bytes <= kSlotBytes) {
    c.exchange_small(call, offer, bytes);
    for (uint32_t r = 0; r < c.ranks; r++)
      parts[r] = c.slot(r);
    consume(size_t(0), bytes, parts.data());
    return;
  }
  for (uint32_t r = 0; r < c.ranks; r++)
    parts[r] = c.area(r);
  for (size_t begin = 0; begin < bytes; begin += kAreaBytes) {
    size_t size = std::min(kAreaBytes, bytes - begin);
    c.exchange_chunk(call, offer + begin, size, [&] { consume(begin, size, parts.data()); });
  }
}

// The bytes that are in both ranges: [begin, end) of the offered bytes, and [from, to).
struct Overlap {
  size_t begin, bytes;
  Overlap(size_t stretch, size_t size, size_t from, size_t to) {
    begin = std::max(stretch, from);
    size_t end = std::min(stretch + size, to);
    bytes = end > begin ? end - begin : 0;
  }
};

// Each rank has an equal part of the bytes. Returns how many of them are on other ranks.
size_t of_others(const Comm &c, size_t bytes) { return bytes - bytes / c->ranks; }

// Returns how many bytes are really sent. With modelled time, floats are not sent, because kernels
// did not compute them. Int8 values, which are quantised floats, are not sent either.
size_t travelling(size_t bytes, HcclDataType type) {
  bool is_computed = type == HCCL_DATA_TYPE_INT8 || type == HCCL_DATA_TYPE_FP16 || type == HCCL_DATA_TYPE_BFP16 ||
                  type == HCCL_DATA_TYPE_FP32 || type == HCCL_DATA_TYPE_FP64;
  return settings().timed && is_computed ? 0 : bytes;
}

// Reduces the elements [from, from + count) over all ranks. `offered` is the number of elements
// that each rank offers.
void reduce_part(Communicator &c, const Call &call, const void *send, void *receive,
                 size_t offered, size_t from, size_t count, HcclDataType type, HcclReduceOp op,
                 bool wanted) {
  size_t size = element_bytes(type);
  all_to_each(c, call, bytes_at(send), travelling(offered * size, type),
              [&](size_t begin, size_t bytes, const char *const *parts) {
                Overlap o(begin, bytes, from * size, (from + count) * size);
                if (!wanted || !o.bytes)
                  return;
                std::vector<const char *> at(parts, parts + c.ranks);
                for (const char *&p : at)
                  p += o.begin - begin;
                reduce(bytes_at(receive) + (o.begin - from * size), at.data(), c.ranks,
                       o.bytes / size, type, op);
              });
}

}  // namespace

EMU_API HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type,
                                 HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  auto run = [=](const Call &call) {
    reduce_part(*c, call, send, receive, count, 0, count, type, op, true);
  };
  // An all-reduce counts as many bytes as a reduce-scatter and an all-gather together.
  size_t bytes = 2 * of_others(c, count * element_bytes(type));
  return launch_for_all(c, "HcclAllReduce", describe("AllReduce", count, type, op), stream, bytes,
                        operation_ns(Pattern::AllReduce, count * element_bytes(type), *c), run);
}

EMU_API HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type,
                              HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  auto run = [=](const Call &call) {
    reduce_part(*c, call, send, receive, count, 0, count, type, op, c->rank == root);
  };
  // A reduce counts as a reduce-scatter on all ranks, and then a gather at the root.
  size_t bytes = (c->rank == root ? 2 : 1) * of_others(c, count * element_bytes(type));
  return launch_for_all(c, "HcclReduce", describe("Reduce", count, type, op), stream, bytes,
                        operation_ns(Pattern::AllReduce, count * element_bytes(type), *c), run);
}

EMU_API HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                                     HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  auto run = [=](const Call &call) {
    reduce_part(*c, call, send, receive, count * c->ranks, count * c->rank, count, type, op, true);
  };
  return launch_for_all(c, "HcclReduceScatter", describe("ReduceScatter", count, type, op), stream,
                        (c->ranks - 1) * count * element_bytes(type),
                        operation_ns(Pattern::ReduceScatter, count * element_bytes(type), *c), run);
}

EMU_API HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type,
                                 HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  auto run = [=](const Call &call) {
    all_to_each(*c, call, bytes_at(send), travelling(bytes, type),
                [&](size_t begin, size_t size, const char *const *parts) {
                  for (uint32_t r = 0; r < c->ranks; r++)
                    memcpy(bytes_at(receive) + r * bytes + begin, parts[r], size);
                });
  };
  return launch_for_all(c, "HcclAllGather", describe("AllGather", count, type), stream,
                        (c->ranks - 1) * bytes, operation_ns(Pattern::AllGather, bytes, *c), run);
}

// Only the root's bytes are used. The other ranks also offer their bytes, because this makes the
// code simpler.
EMU_API HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root,
                                 HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  auto run = [=](const Call &call) {
    all_to_each(*c, call, bytes_at(data), travelling(bytes, type),
                [&](size_t begin, size_t size, const char *const *parts) {
                  if (c->rank != root)
                    memcpy(bytes_at(data) + begin, parts[root], size);
                });
  };
  return launch_for_all(c, "HcclBroadcast", describe("Broadcast", count, type, root), stream,
                        c->rank == root ? 0 : bytes, operation_ns(Pattern::Broadcast, bytes, *c),
                        run);
}

EMU_API HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                               uint32_t root, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  auto run = [=](const Call &call) {
    std::vector<char> nothing(c->rank == root ? 0 : bytes * c->ranks);
    const char *offer = c->rank == root ? bytes_at(send) : nothing.data();
    all_to_each(*c, call, offer, travelling(bytes * c->ranks, type),
                [&](size_t begin, size_t size, const char *const *parts) {
                  Overlap o(begin, size, bytes * c->rank, bytes * (c->rank + 1));
                  memcpy(bytes_at(receive) + (o.begin - bytes * c->rank) * (o.bytes > 0),
                         parts[root] + (o.begin - begin) * (o.bytes > 0), o.bytes);
                });
  };
  return launch_for_all(c, "HcclScatter", describe("Scatter", count, type, root), stream,
                        c->rank == root ? 0 : bytes, operation_ns(Pattern::ReduceScatter, bytes, *c),
                        run);
}

EMU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  auto run = [=](const Call &call) {
    all_to_each(*c, call, nullptr, 0,
                [](size_t, size_t, const char *const *) {});
  };
  return launch_for_all(c, "HcclBarrier", describe("Barrier", 0, 0), stream, 0,
                        operation_ns(Pattern::AllReduce, 0, *c), run);
}

EMU_API HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType type,
                                const void *receive, uint64_t, HcclDataType, HcclComm comm,
                                aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  auto run = [=](const Call &call) {
    all_to_each(*c, call, bytes_at(send), travelling(bytes * c->ranks, type),
                [&](size_t begin, size_t size, const char *const *parts) {
                  size_t mine = bytes * c->rank;
                  Overlap o(begin, size, mine, mine + bytes);
                  for (uint32_t r = 0; r < c->ranks && o.bytes; r++)
                    memcpy(bytes_at(receive) + r * bytes + (o.begin - mine),
                           parts[r] + (o.begin - begin), o.bytes);
                });
  };
  return launch_for_all(c, "HcclAlltoAll", describe("AlltoAll", count, type), stream,
                        (c->ranks - 1) * bytes, operation_ns(Pattern::AllToAll, bytes, *c), run);
}

// Counts and displacements are arrays on the host. Their values are read at the launch, and a
// captured graph uses these values in each replay. After all ranks have compared the call, each
// pair of ranks exchanges its part through mailboxes.
EMU_API HcclResult HcclAlltoAllV(const void *send, const void *send_counts,
                                 const void *send_displacements, HcclDataType type,
                                 const void *receive, const void *receive_counts,
                                 const void *receive_displacements, HcclDataType, HcclComm comm,
                                 aclrtStream stream) {
  Comm c = communicator(comm);
  size_t size = element_bytes(type);
  auto values = [&](const void *p) {
    auto *v = static_cast<const uint64_t *>(p);
    return std::vector<uint64_t>(v, v + c->ranks);
  };
  auto counts = values(send_counts), displacements = values(send_displacements);
  auto wanted = values(receive_counts), places = values(receive_displacements);
  Transfers mine;
  for (uint32_t peer = 0; peer < c->ranks; peer++) {
    mine.sends.push_back({peer, bytes_at(send) + displacements[peer] * size, counts[peer] * size});
    mine.receives.push_back({peer, bytes_at(receive) + places[peer] * size, wanted[peer] * size});
  }
  auto run = [=](const Call &call) {
    all_to_each(*c, call, nullptr, 0, [](size_t, size_t, const char *const *) {});
    exchange(*c, mine);
  };
  return launch_for_all(c, "HcclAlltoAllV", describe("AlltoAllV", 0, type), stream,
                        bytes_from_others(*c, mine), exchange_ns(*c, mine), run);
}

std::optional<Domain> emu::hccl::find_domain(const std::string &name, uint32_t rank) {
  Comm c = find(name, rank);
  if (!c)
    return {};
  auto exchange = [c](const std::string &what, const char *offer, size_t bytes,
                      Domain::Consume consume) {
    Call call{};
    snprintf(call.text, sizeof call.text, "%s", what.c_str());
    c->check_usable();
    all_to_each(*c, call, offer, bytes, consume);
    count_collective(c->device, 0);  // 0 bytes: only the operator knows how many are really sent
  };
  bool has_collectives = !c->claim(Communicator::Use::Kernels);
  return Domain{c->ranks, c->rank, c->buffer_mb, has_collectives, exchange};
}
