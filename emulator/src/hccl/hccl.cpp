// libhccl.so: collectives between processes of one host, over POSIX shared memory.
//
// Every rank owns one sparse slab that all ranks map. A collective is: publish my bytes and the
// signature of my call, barrier, compare signatures, read the others' bytes, barrier.
#include "emulator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <third_party/hccl/inc/hccl/hccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t kSlabBytes = 1ull << 30;  // sparse: only touched pages cost memory
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kSignatureBytes = 96;

using Clock = std::chrono::steady_clock;

struct SlabHeader {
  std::atomic<uint64_t> sequence;
  char signature[kSignatureBytes];
};
struct Mailbox {  // one message in flight from one rank to another
  std::atomic<uint64_t> written, read;
  uint64_t bytes;
};

long timeout_seconds() {
  return emu::settings().hccl_s;
}

char *map_shared(const std::string &name, size_t bytes) {
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0)
    throw std::runtime_error("shm_open " + name + " failed");
  void *p = MAP_FAILED;
  if (ftruncate(file, bytes) == 0)
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (p == MAP_FAILED)
    throw std::runtime_error("mapping " + name + " failed");
  return static_cast<char *>(p);
}

struct Communicator {
  std::string name;
  uint32_t ranks, rank;
  std::vector<SlabHeader *> headers;
  std::vector<char *> slabs;
  std::vector<std::vector<Mailbox *>> mailboxes;  // [from][to], opened at first use
  std::mutex mutex;
  uint64_t sequence = 0;

  Communicator(std::string name_, uint32_t ranks_, uint32_t rank_)
      : name(std::move(name_)), ranks(ranks_), rank(rank_),
        mailboxes(ranks_, std::vector<Mailbox *>(ranks_, nullptr)) {
    auto slab_name = [&](uint32_t r) { return "/" + name + "." + std::to_string(r); };
    for (uint32_t r = 0; r < ranks; r++) {
      char *p = map_shared(slab_name(r), kSlabBytes + kHeaderBytes);
      headers.push_back(reinterpret_cast<SlabHeader *>(p));
      slabs.push_back(p + kHeaderBytes);
    }
    barrier("init");
    for (uint32_t r = 0; r < ranks && rank == 0; r++)
      shm_unlink(slab_name(r).c_str());  // all have it mapped
  }

  template <class Ready>
  void wait(Ready ready, const std::string &operation, const std::string &what) {
    auto start = Clock::now();
    for (int i = 0; !ready(); i++) {
      if (i < 200)
        sched_yield();
      else
        usleep(50);
      if (Clock::now() - start > std::chrono::seconds(timeout_seconds()))
        throw std::runtime_error("HCCL timeout: rank " + std::to_string(rank) + " of " + name +
                                 " in " + operation + ", waiting for " + what);
    }
  }

  void barrier(const std::string &operation) {
    uint64_t mine = ++sequence;
    headers[rank]->sequence = mine;
    for (uint32_t r = 0; r < ranks; r++)
      wait([&] { return headers[r]->sequence.load() >= mine; }, operation,
           "rank " + std::to_string(r));
  }

  // Publishes `bytes` bytes at `data`, then runs `consume` when every rank's are visible.
  template <class Consume>
  void exchange(const std::string &signature, const void *data, size_t bytes, Consume consume) {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(bytes <= kSlabBytes, "HCCL message of ", bytes, " bytes is too large");
    if (bytes)
      memcpy(slabs[rank], emu::accessible(data), bytes);
    strncpy(headers[rank]->signature, signature.c_str(), kSignatureBytes - 1);
    barrier(signature);
    for (uint32_t r = 0; r < ranks; r++)
      if (strncmp(headers[r]->signature, headers[rank]->signature, kSignatureBytes))
        throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) + " runs " +
                                 signature + ", rank " + std::to_string(r) + " runs " +
                                 headers[r]->signature);
    consume();
    barrier(signature);
  }

  Mailbox *mailbox(uint32_t from, uint32_t to) {
    std::lock_guard<std::mutex> lock(mutex);
    Mailbox *&box = mailboxes[from][to];
    if (!box)
      box = reinterpret_cast<Mailbox *>(
          map_shared(mailbox_name(from, to), kSlabBytes + kHeaderBytes));
    return box;
  }
  // Only the receiver removes a mailbox's name: by then the sender has it mapped.
  void unlink_mailboxes() {
    for (uint32_t from = 0; from < ranks; from++)
      if (mailboxes[from][rank])
        shm_unlink(mailbox_name(from, rank).c_str());
  }

private:
  std::string mailbox_name(uint32_t from, uint32_t to) const {
    return "/" + name + ".p" + std::to_string(from) + "." + std::to_string(to);
  }
};

Communicator *communicator(HcclComm handle) { return static_cast<Communicator *>(handle); }

HcclResult open_communicator(const std::string &name, uint32_t ranks, uint32_t rank,
                             HcclComm *out) {
  try {
    *out = new Communicator(name, ranks, rank);
    return HCCL_SUCCESS;
  } catch (const std::exception &e) {
    emu::fail(1, "%s", e.what());
    return HCCL_E_TIMEOUT;
  }
}

at::ScalarType scalar_type(HcclDataType dtype) {
  switch (dtype) {
  case HCCL_DATA_TYPE_INT8:
    return at::kChar;
  case HCCL_DATA_TYPE_INT16:
    return at::kShort;
  case HCCL_DATA_TYPE_INT32:
    return at::kInt;
  case HCCL_DATA_TYPE_INT64:
    return at::kLong;
  case HCCL_DATA_TYPE_UINT8:
    return at::kByte;
  case HCCL_DATA_TYPE_FP16:
    return at::kHalf;
  case HCCL_DATA_TYPE_FP32:
    return at::kFloat;
  case HCCL_DATA_TYPE_FP64:
    return at::kDouble;
  case HCCL_DATA_TYPE_BFP16:
    return at::kBFloat16;
  default:
    TORCH_CHECK(false, "reduction of HcclDataType ", static_cast<int>(dtype), " is not emulated");
  }
}

size_t element_bytes(HcclDataType dtype) {
  switch (dtype) {
  case HCCL_DATA_TYPE_INT16:
  case HCCL_DATA_TYPE_UINT16:
  case HCCL_DATA_TYPE_FP16:
  case HCCL_DATA_TYPE_BFP16:
    return 2;
  case HCCL_DATA_TYPE_INT32:
  case HCCL_DATA_TYPE_UINT32:
  case HCCL_DATA_TYPE_FP32:
    return 4;
  case HCCL_DATA_TYPE_INT64:
  case HCCL_DATA_TYPE_UINT64:
  case HCCL_DATA_TYPE_FP64:
    return 8;
  case HCCL_DATA_TYPE_INT128:
    return 16;
  default:
    return 1;
  }
}

// Sums in rank order, small floats in fp32: deterministic, but not the device's rounding.
void reduce(Communicator *c, void *out, size_t first, size_t count, HcclDataType dtype,
            HcclReduceOp op) {
  at::NoGradGuard no_grad;
  at::ScalarType type = scalar_type(dtype);
  bool widen = at::isFloatingType(type) && type != at::kDouble;
  auto shape = {static_cast<int64_t>(count)};
  auto part = [&](uint32_t r) {
    char *p = c->slabs[r] + first * element_bytes(dtype);
    at::Tensor t = at::from_blob(p, shape, type);
    return widen ? t.to(at::kFloat) : t;
  };
  at::Tensor total = part(0).clone();
  for (uint32_t r = 1; r < c->ranks; r++) {
    at::Tensor b = part(r);
    if (op == HCCL_REDUCE_SUM)
      total.add_(b);
    else if (op == HCCL_REDUCE_PROD)
      total.mul_(b);
    else
      total = op == HCCL_REDUCE_MAX ? at::maximum(total, b) : at::minimum(total, b);
  }
  at::from_blob(emu::accessible(out), shape, type).copy_(total);
}

std::string signature(const char *name, uint64_t count, int dtype, int argument = 0) {
  return std::string(name) + " count=" + std::to_string(count) + " dtype=" + std::to_string(dtype) +
         " arg=" + std::to_string(argument);
}

HcclResult launch(const char *name, aclrtStream stream, std::function<void()> body) {
  aclError e = emu::launch(stream, emu::TaskKind::Kernel, name, std::move(body));
  return e ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

char *bytes_at(const void *p) {
  return static_cast<char *>(const_cast<void *>(emu::accessible(p)));
}

}  // namespace

// ---- communicators

EMU_API HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  static std::atomic<int> next{0};
  memset(root, 0, sizeof *root);
  snprintf(root->internal, kSignatureBytes, "emu_hccl_%d_%lld_%d", getpid(),
           static_cast<long long>(Clock::now().time_since_epoch().count()), next++);
  return HCCL_SUCCESS;
}
EMU_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root, uint32_t rank,
                                        HcclComm *out) {
  return open_communicator(root->internal, ranks, rank, out);
}
EMU_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root,
                                              uint32_t rank, const HcclCommConfig *,
                                              HcclComm *out) {
  return open_communicator(root->internal, ranks, rank, out);
}
EMU_API HcclResult HcclCreateSubCommConfig(HcclComm *parent, uint32_t ranks, uint32_t *,
                                           uint64_t id, uint32_t rank, HcclCommConfig *,
                                           HcclComm *out) {
  std::string name = communicator(*parent)->name + "_" + std::to_string(id);
  return open_communicator(name, ranks, rank, out);
}
EMU_API HcclResult HcclCommDestroy(HcclComm comm) {
  communicator(comm)->unlink_mailboxes();
  return HCCL_SUCCESS;  // the object is leaked: captured graphs may still name it
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
EMU_API HcclResult HcclGroupStart() { return HCCL_SUCCESS; }
EMU_API HcclResult HcclGroupEnd() { return HCCL_SUCCESS; }

// ---- collectives

EMU_API HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType dtype,
                                 HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  return launch("HcclAllReduce", stream, [=] {
    c->exchange(signature("AllReduce", count, dtype, op), send, count * element_bytes(dtype),
                [=] { reduce(c, receive, 0, count, dtype, op); });
  });
}

EMU_API HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType dtype,
                              HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  return launch("HcclReduce", stream, [=] {
    c->exchange(signature("Reduce", count, dtype, op), send, count * element_bytes(dtype), [=] {
      if (c->rank == root)
        reduce(c, receive, 0, count, dtype, op);
    });
  });
}

EMU_API HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType dtype,
                                     HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  return launch("HcclReduceScatter", stream, [=] {
    c->exchange(signature("ReduceScatter", count, dtype, op), send,
                count * element_bytes(dtype) * c->ranks,
                [=] { reduce(c, receive, count * c->rank, count, dtype, op); });
  });
}

EMU_API HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType dtype,
                                 HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclAllGather", stream, [=] {
    c->exchange(signature("AllGather", count, dtype), send, bytes, [=] {
      for (uint32_t r = 0; r < c->ranks; r++)
        memcpy(bytes_at(receive) + r * bytes, c->slabs[r], bytes);
    });
  });
}

EMU_API HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType dtype, uint32_t root,
                                 HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclBroadcast", stream, [=] {
    c->exchange(signature("Broadcast", count, dtype, root), data, c->rank == root ? bytes : 0, [=] {
      if (c->rank != root)
        memcpy(bytes_at(data), c->slabs[root], bytes);
    });
  });
}

EMU_API HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType dtype,
                               uint32_t root, HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclScatter", stream, [=] {
    c->exchange(signature("Scatter", count, dtype, root), send,
                c->rank == root ? bytes * c->ranks : 0,
                [=] { memcpy(bytes_at(receive), c->slabs[root] + bytes * c->rank, bytes); });
  });
}

EMU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  return launch("HcclBarrier", stream, [=] { c->exchange("Barrier", nullptr, 0, [] {}); });
}

EMU_API HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType dtype,
                                const void *receive, uint64_t, HcclDataType, HcclComm comm,
                                aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclAlltoAll", stream, [=] {
    c->exchange(signature("AlltoAll", count, dtype), send, bytes * c->ranks, [=] {
      for (uint32_t r = 0; r < c->ranks; r++)
        memcpy(bytes_at(receive) + r * bytes, c->slabs[r] + c->rank * bytes, bytes);
    });
  });
}

// The slab holds one offset for each receiving rank, then the parts. Counts and displacements are
// host arrays: they are fixed at launch, also inside a captured graph.
EMU_API HcclResult HcclAlltoAllV(const void *send, const void *send_counts,
                                 const void *send_displacements, HcclDataType dtype,
                                 const void *receive, const void *receive_counts,
                                 const void *receive_displacements, HcclDataType, HcclComm comm,
                                 aclrtStream stream) {
  auto *c = communicator(comm);
  size_t size = element_bytes(dtype);
  auto values = [&](const void *p) {
    auto *v = static_cast<const uint64_t *>(p);
    return std::vector<uint64_t>(v, v + c->ranks);
  };
  auto counts = values(send_counts), displacements = values(send_displacements);
  auto wanted = values(receive_counts), places = values(receive_displacements);
  return launch("HcclAlltoAllV", stream, [=] {
    std::vector<uint64_t> offsets(c->ranks);
    uint64_t end = c->ranks * sizeof(uint64_t);
    for (uint32_t r = 0; r < c->ranks; r++) {
      offsets[r] = end;
      end += counts[r] * size;
    }
    std::vector<char> packed(end);
    memcpy(packed.data(), offsets.data(), c->ranks * sizeof(uint64_t));
    for (uint32_t r = 0; r < c->ranks; r++)
      memcpy(packed.data() + offsets[r], bytes_at(send) + displacements[r] * size,
             counts[r] * size);
    c->exchange(signature("AlltoAllV", 0, dtype), packed.data(), packed.size(), [=] {
      for (uint32_t r = 0; r < c->ranks; r++) {
        uint64_t offset;
        memcpy(&offset, c->slabs[r] + c->rank * sizeof offset, sizeof offset);
        memcpy(bytes_at(receive) + places[r] * size, c->slabs[r] + offset, wanted[r] * size);
      }
    });
  });
}

// ---- point to point: a send is complete when its mailbox holds the message

EMU_API HcclResult HcclSend(void *data, uint64_t count, HcclDataType dtype, uint32_t to,
                            HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclSend", stream, [=] {
    TORCH_CHECK(bytes <= kSlabBytes, "HCCL message of ", bytes, " bytes is too large");
    Mailbox *box = c->mailbox(c->rank, to);
    c->wait([=] { return box->written == box->read; }, "Send",
            "rank " + std::to_string(to) + " to take the previous message");
    memcpy(reinterpret_cast<char *>(box) + kHeaderBytes, bytes_at(data), bytes);
    box->bytes = bytes;
    box->written++;
  });
}

EMU_API HcclResult HcclRecv(void *data, uint64_t count, HcclDataType dtype, uint32_t from,
                            HcclComm comm, aclrtStream stream) {
  auto *c = communicator(comm);
  size_t bytes = count * element_bytes(dtype);
  return launch("HcclRecv", stream, [=] {
    Mailbox *box = c->mailbox(from, c->rank);
    c->wait([=] { return box->written > box->read; }, "Recv",
            "a message of rank " + std::to_string(from));
    if (box->bytes != bytes)
      throw std::runtime_error("HCCL mismatch: receiving " + std::to_string(bytes) +
                               " bytes, rank " + std::to_string(from) + " sent " +
                               std::to_string(box->bytes));
    memcpy(bytes_at(data), reinterpret_cast<char *>(box) + kHeaderBytes, bytes);
    box->read++;
  });
}
