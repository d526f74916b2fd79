// A communicator: ranks of one host that exchange messages through shared memory.
//
// Every rank owns a segment that all map. Small messages go through two slots used in turn, so that
// one barrier suffices: nobody can be two operations ahead of a rank that still reads. Larger ones
// go through the segment's area in chunks, each between two barriers.
#pragma once

#include "emulator.h"
#include "hccl/capture_sessions.h"

#include <atomic>
#include <array>
#include <mutex>
#include <string>
#include <vector>

namespace emu::hccl {

constexpr size_t kSlotBytes = 64 << 10;
constexpr size_t kAreaBytes = 4 << 20;  // one chunk of a large message
constexpr size_t kDescriptionBytes = 112;

// What a rank runs, for comparison and messages.
struct Call {
  char text[kDescriptionBytes];
  uint32_t session;  // the capture that is replayed; 0: the call is not part of a graph
};

struct Header {
  std::atomic<uint32_t> arrived;  // barriers that this rank has reached, for messages
  // Of rank 0 only: arrivals of all, and the last barrier that is complete (a futex word).
  std::atomic<uint32_t> arrivals, completed, sleepers;
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_time;  // of the process, against reuse of its id
  CaptureSessions::Dropped dropped_session;
  Call calls[2];
};

// One direction between two ranks, inside the receiver's segment.
struct Mailbox {
  std::atomic<uint32_t> written, read;  // chunks; futex words
  std::atomic<uint32_t> sleepers;
  uint64_t message_bytes;
};
constexpr size_t kMailboxBytes = 256 << 10;

class Communicator {
public:
  const std::string name;
  const uint32_t ranks, rank;

  Communicator(std::string name, uint32_t ranks, uint32_t rank);
  ~Communicator();
  Communicator(const Communicator &) = delete;

  // Publishes `bytes` bytes at `data` (at most kSlotBytes), waits for all, checks that all run the
  // same call, then slot(r) holds the bytes of rank r, until the next operation.
  void exchange_small(const Call &call, const void *data, size_t bytes);
  // In chunks: `publish(area)` writes this rank's chunk, `consume()` runs when all are visible.
  template <class Publish, class Consume>
  void exchange_chunk(const Call &call, Publish publish, Consume consume) {
    calls_++;
    announce(call);
    publish(area_);
    barrier(call);
    compare(call);
    consume();
    barrier(call);
  }
  const char *slot(uint32_t r) const { return slots_[r][slot_index_]; }
  const char *area(uint32_t r) const { return areas_[r]; }

  void send(const void *data, size_t bytes, uint32_t to);
  void receive(void *data, size_t bytes, uint32_t from);

  // One communicator is for collectives, or for operators that communicate inside their kernel: the
  // kernels keep flags and data of several steps in its windows, where collectives write too
  // (documents of npu_moe_distribute_dispatch_v2 and _combine_v2). Whoever comes first has it.
  enum class Use { None, Collectives, Kernels };
  bool claim(Use use) {
    Use owner = Use::None;
    return use_.compare_exchange_strong(owner, use) || owner == use;
  }

  CaptureSessions &sessions() { return sessions_; }

  // Collectives of one communicator are one after the other.
  std::mutex &order() { return order_; }

  int device = 0;
  uint32_t buffer_mb = 0;

private:
  std::atomic<Use> use_{Use::None};
  CaptureSessions sessions_;
  std::mutex order_;
  std::vector<char *> segments_;
  std::vector<Header *> headers_;
  std::vector<char *> areas_;
  std::vector<std::array<char *, 2>> slots_;
  char *area_ = nullptr;
  uint32_t barriers_ = 0, calls_ = 0;
  int slot_index_ = 0;

  std::string segment_name(uint32_t r) const;
  size_t segment_bytes() const;
  Mailbox *mailbox(uint32_t from, uint32_t to) const;
  void meet();  // all ranks have mapped all segments
  void announce(const Call &call);
  void barrier(const Call &call);
  void compare(const Call &call) const;
  // Waits until word >= at_least. Throws if `peers` (a bit for each rank, asked now and then) are
  // dead, or when hccl_s has passed.
  template <class Peers>
  void wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, uint32_t at_least,
            const char *operation, Peers peers);
  bool alive(uint32_t other) const;
};

}  // namespace emu::hccl
