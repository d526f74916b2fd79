// A communicator: ranks that exchange messages, over shared memory within a host, and over sockets
// (links.h) between hosts. Every rank owns a memory segment, which all ranks of its host map. Small
// messages use two slots in turn. One barrier per message is enough: a rank overwrites a slot only
// after the barrier of the next message, and every rank reads the slot before it arrives at that
// barrier. Larger messages use the segment's area in chunks, and each chunk is between two
// barriers. For each rank on another host, this process has a private segment, into which it reads
// that rank's data. So the code uses the segments of all ranks in the same way, and the results of
// sums do not depend on the hosts of ranks.
#pragma once

#include "emulator.h"
#include "hccl/call.h"
#include "hccl/capture_sessions.h"
#include "hccl/links.h"

#include <atomic>
#include <array>
#include <mutex>
#include <string>
#include <vector>

namespace emu::hccl {

constexpr size_t kSlotBytes = 64 << 10;
constexpr size_t kAreaBytes = 4 << 20;  // one chunk of a large message

// Aborted work may leave arbitrary values in these counters. So a communicator has several lives:
// an abort ends a life, and HcclCommResume begins the next life. There are two sets of counters,
// which successive lives use in turn. A rank that aborts sets the counters of the next life to 0.
// No rank uses these counters before all ranks have aborted.
struct Barriers {
  std::atomic<uint32_t> arrived;  // barriers that this rank has reached, for error messages
  // Only the counters in the segment of the host's first rank are used: the number of arrivals of
  // all ranks of the host, and the number of the last complete barrier, which is a futex word.
  std::atomic<uint32_t> arrivals, completed, sleepers;
};

struct Header {
  Barriers barriers[2];
  std::atomic<uint32_t> lives_over;  // number of lives that aborts of this rank have ended
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_time;  // of the process, because its id may be reused
  CaptureSessions::Dropped dropped_session;
  Call calls[2];
};

// The messages from one rank to another. A mailbox is in the segment of the receiver.
struct Mailbox {
  struct Progress {
    std::atomic<uint32_t> written, read;  // chunks; futex words
    std::atomic<uint32_t> sleepers;
  } progress[2];  // two sets, as for Barriers
  uint64_t message_bytes;
  int64_t sent_ns;  // with modelled time: when the sender arrived
};
constexpr size_t kMailboxBytes = 256 << 10;

class Communicator {
public:
  const std::string name;
  const uint32_t ranks, rank;

  Communicator(const RootInfo &root, uint32_t ranks, uint32_t rank, int device);
  ~Communicator();
  Communicator(const Communicator &) = delete;

  // Publishes the data of this rank (at most kSlotBytes bytes), waits for all ranks, and checks
  // that all ranks run the same call. Then slot(r) contains the bytes of rank r until the next
  // operation.
  void exchange_small(const Call &call, const void *data, size_t bytes);
  // Publishes up to kAreaBytes bytes of this rank, and then waits and checks like exchange_small.
  // While `consume()` runs, area(r) contains the bytes of rank r.
  template <class Consume>
  void exchange_chunk(const Call &call, const void *data, size_t bytes, Consume consume) {
    exchange(call, areas_, data, bytes);
    consume();
    barrier(call);
  }
  const char *slot(uint32_t r) const { return slots_[slot_index_][r]; }
  const char *area(uint32_t r) const { return areas_[r]; }

  void send(const void *data, size_t bytes, uint32_t to);
  void receive(void *data, size_t bytes, uint32_t from);

  // A communicator is used either for collectives or for operators that communicate inside their
  // kernel. Such kernels keep flags and data of several steps in the communicator's windows, and
  // collectives would write to the same windows (documents of npu_moe_distribute_dispatch_v2 and
  // _combine_v2). The first operation decides which of the two uses is permitted.
  enum class Use { None, Collectives, Kernels };
  bool claim(Use use) {
    Use owner = Use::None;
    return use_.compare_exchange_strong(owner, use) || owner == use;
  }

  // To be called when an abort of the device begins. Then no call is permitted until `resume`.
  void suspend() { is_suspended_ = true; }
  // To be called during an abort, when all tasks of this rank have ended.
  void end_life();
  // Begins the next life. If this is not possible, throws an error with the reason.
  void resume();
  bool is_suspended() const { return is_suspended_; }
  // Throws if the communicator is suspended or was destroyed, because then no task may run.
  void check_usable() const;
  std::atomic<bool> is_destroyed{false};
  // Counts the users of the communicator: running calls of the host, queued or running tasks, and
  // tasks of captured graphs.
  std::atomic<int> calls{0}, tasks{0}, captured_tasks{0};

  CaptureSessions &sessions() { return sessions_; }
  // `hear_dropped` receives the numbers of captures that ranks on other hosts have dropped.
  // `tell_dropped` sends them the number of a capture that this rank has dropped.
  void hear_dropped();
  void tell_dropped(uint32_t number) { links_.tell(number); }

  uint32_t ranks_here() const { return static_cast<uint32_t>(here_.size()); }

  // Operations lock this mutex, so that operations of one communicator run one after the other.
  std::mutex &order() { return order_; }

  const int device;
  uint32_t buffer_mb = 0;

private:
  std::atomic<Use> use_{Use::None};
  const std::string memory_;          // prefix of the names of this host's segments
  const std::vector<uint32_t> here_;  // the ranks of this host
  Links links_;
  CaptureSessions sessions_;
  std::mutex order_;
  std::vector<char *> segments_;
  std::vector<Header *> headers_;
  std::vector<char *> areas_, slots_[2];  // of each rank
  uint32_t barriers_ = 0, calls_ = 0;
  int slot_index_ = 0;
  uint32_t life_ = 0;  // changes only while no task runs
  std::atomic<bool> is_suspended_{false};

  Communicator(const RootInfo &root, uint32_t ranks, uint32_t rank, int device, Company company);
  bool is_here(uint32_t r) const;
  std::string segment_name(uint32_t r) const;
  size_t segment_bytes() const;
  Mailbox *mailbox(uint32_t from, uint32_t to) const;
  void arrive(const RootInfo &root);  // waits until all ranks of this host have mapped all segments
  // Publishes this rank's call and data, waits for all ranks, and checks that all ranks run the
  // same call. Then rooms[r] contains the bytes of rank r.
  void exchange(const Call &call, const std::vector<char *> &rooms, const void *data, size_t bytes);
  void barrier(const Call &call);
  void compare(const Call &call) const;
  void exchange_clocks() const;  // with modelled time: the clocks that all ranks reported
  // Waits until word >= at_least. `peers` is called from time to time, and returns the ranks for
  // which this rank waits.
  template <class Peers>
  void wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, uint32_t at_least,
            const char *operation, Peers peers);
  bool alive(uint32_t other) const;
  Barriers &barriers_of(uint32_t r) const { return headers_[r]->barriers[life_ & 1]; }
};

}  // namespace emu::hccl
