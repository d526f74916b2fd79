// The collectives and point-to-point calls. Each is one task of the stream, so that it may be
// captured like any other.
#include "hccl/domain.h"
#include "hccl/handles.h"
#include "hccl/reduce.h"
#include "runtime/services.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

using namespace emu;
using namespace emu::hccl;
using Comm = std::shared_ptr<Communicator>;

namespace {

Call describe(const char *name, uint64_t count, int type, int argument = 0) {
  Call call{};
  snprintf(call.text, sizeof call.text, "%s count=%llu dtype=%d arg=%d", name,
           static_cast<unsigned long long>(count), type, argument);
  return call;
}

char *bytes_at(const void *p) {
  return static_cast<char *>(const_cast<void *>(accessible(p)));
}

HcclResult launch_on(const Comm &c, const char *name, aclrtStream stream, Task body) {
  if (!c->claim(Communicator::Use::Collectives)) {
    return fail(1,
                "%s on communicator %s, which operators use that communicate inside their kernel "
                "(MC2): they need one of their own",
                name, c->name.c_str())
               ? HCCL_E_NOT_SUPPORT
               : HCCL_SUCCESS;
  }
  if (use_domain(stream, c.get(), c->ranks))
    return HCCL_E_RUNTIME;
  auto counted = [c, body = std::move(body)] {
    body();
    count_collective(c->device);
  };
  return launch(stream, TaskKind::Kernel, name, std::move(counted)) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

// Every rank offers the same number of bytes, and `consume(begin, bytes, parts)` gets that stretch
// of all offers. In one go if the offer fits a slot, else in chunks.
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
    c.exchange_chunk(
        call, [&](char *area) { memcpy(area, offer + begin, size); },
        [&] { consume(begin, size, parts.data()); });
  }
}

// A stretch [begin, end) of the offers cut to [from, to): what lies in both.
struct Overlap {
  size_t begin, bytes;
  Overlap(size_t stretch, size_t size, size_t from, size_t to) {
    begin = std::max(stretch, from);
    size_t end = std::min(stretch + size, to);
    bytes = end > begin ? end - begin : 0;
  }
};

// Reduces the elements [from, from + count) of all offers of `offered` elements.
void reduce_part(Communicator &c, const Call &call, const void *send, void *receive,
                 size_t offered, size_t from, size_t count, HcclDataType type, HcclReduceOp op,
                 bool wanted) {
  size_t size = element_bytes(type);
  all_to_each(c, call, bytes_at(send), offered * size,
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
  return launch_on(c, "HcclAllReduce", stream, [=] {
    reduce_part(*c, describe("AllReduce", count, type, op), send, receive, count, 0, count, type,
                op, true);
  });
}

EMU_API HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type,
                              HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  return launch_on(c, "HcclReduce", stream, [=] {
    reduce_part(*c, describe("Reduce", count, type, op), send, receive, count, 0, count, type, op,
                c->rank == root);
  });
}

EMU_API HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                                     HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  return launch_on(c, "HcclReduceScatter", stream, [=] {
    reduce_part(*c, describe("ReduceScatter", count, type, op), send, receive, count * c->ranks,
                count * c->rank, count, type, op, true);
  });
}

EMU_API HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type,
                                 HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclAllGather", stream, [=] {
    all_to_each(*c, describe("AllGather", count, type), bytes_at(send), bytes,
                [&](size_t begin, size_t size, const char *const *parts) {
                  for (uint32_t r = 0; r < c->ranks; r++)
                    memcpy(bytes_at(receive) + r * bytes + begin, parts[r], size);
                });
  });
}

// Only the root's bytes are read; the others offer theirs, which is simpler than not doing so.
EMU_API HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root,
                                 HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclBroadcast", stream, [=] {
    all_to_each(*c, describe("Broadcast", count, type, root), bytes_at(data), bytes,
                [&](size_t begin, size_t size, const char *const *parts) {
                  if (c->rank != root)
                    memcpy(bytes_at(data) + begin, parts[root], size);
                });
  });
}

EMU_API HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                               uint32_t root, HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclScatter", stream, [=] {
    std::vector<char> nothing(c->rank == root ? 0 : bytes * c->ranks);
    const char *offer = c->rank == root ? bytes_at(send) : nothing.data();
    all_to_each(*c, describe("Scatter", count, type, root), offer, bytes * c->ranks,
                [&](size_t begin, size_t size, const char *const *parts) {
                  Overlap o(begin, size, bytes * c->rank, bytes * (c->rank + 1));
                  memcpy(bytes_at(receive) + (o.begin - bytes * c->rank) * (o.bytes > 0),
                         parts[root] + (o.begin - begin) * (o.bytes > 0), o.bytes);
                });
  });
}

EMU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  return launch_on(c, "HcclBarrier", stream, [=] {
    all_to_each(*c, describe("Barrier", 0, 0), nullptr, 0,
                [](size_t, size_t, const char *const *) {});
  });
}

EMU_API HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType type,
                                const void *receive, uint64_t, HcclDataType, HcclComm comm,
                                aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclAlltoAll", stream, [=] {
    all_to_each(*c, describe("AlltoAll", count, type), bytes_at(send), bytes * c->ranks,
                [&](size_t begin, size_t size, const char *const *parts) {
                  size_t mine = bytes * c->rank;
                  Overlap o(begin, size, mine, mine + bytes);
                  for (uint32_t r = 0; r < c->ranks && o.bytes; r++)
                    memcpy(bytes_at(receive) + r * bytes + (o.begin - mine),
                           parts[r] + (o.begin - begin), o.bytes);
                });
  });
}

// Counts and displacements are host arrays: fixed at launch, also inside a captured graph. Each
// pair of ranks exchanges its part by the mailboxes, after all agreed that this is the call.
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
  return launch_on(c, "HcclAlltoAllV", stream, [=] {
    all_to_each(*c, describe("AlltoAllV", 0, type), nullptr, 0,
                [](size_t, size_t, const char *const *) {});
    std::lock_guard<std::mutex> in_order(c->order());
    // The offset at which a pair meets is the same for both sides, so that nobody waits in a ring.
    for (uint32_t step = 0; step < c->ranks; step++) {
      uint32_t peer = (step + c->ranks - c->rank) % c->ranks;
      const char *from = bytes_at(send) + displacements[peer] * size;
      char *to = bytes_at(receive) + places[peer] * size;
      if (peer == c->rank) {
        if (counts[peer] != wanted[peer])
          throw std::runtime_error("HCCL mismatch: AlltoAllV of a rank with itself");
        memcpy(to, from, counts[peer] * size);
      } else if (c->rank < peer) {
        c->send(from, counts[peer] * size, peer);
        c->receive(to, wanted[peer] * size, peer);
      } else {
        c->receive(to, wanted[peer] * size, peer);
        c->send(from, counts[peer] * size, peer);
      }
    }
  });
}

EMU_API HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t to,
                            HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclSend", stream, [=] { c->send(data, bytes, to); });
}

EMU_API HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t from,
                            HcclComm comm, aclrtStream stream) {
  Comm c = communicator(comm);
  size_t bytes = count * element_bytes(type);
  return launch_on(c, "HcclRecv", stream, [=] { c->receive(data, bytes, from); });
}

std::optional<Domain> emu::hccl::find_domain(const std::string &name, uint32_t rank) {
  Comm c = find(name, rank);
  if (!c)
    return {};
  auto exchange = [c](const std::string &what, const char *offer, size_t bytes,
                      Domain::Consume consume) {
    Call call{};
    snprintf(call.text, sizeof call.text, "%s", what.c_str());
    all_to_each(*c, call, offer, bytes, consume);
    count_collective(c->device);
  };
  bool has_collectives = !c->claim(Communicator::Use::Kernels);
  return Domain{c->ranks, c->rank, c->buffer_mb, has_collectives, exchange};
}
