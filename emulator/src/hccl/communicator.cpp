#include "hccl/communicator.h"

#include "hccl/shared_memory.h"
#include "runtime/services.h"
#include "runtime/spin.h"

#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include <unistd.h>

namespace emu::hccl {

using Clock = std::chrono::steady_clock;

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kMailboxStride = kHeaderBytes + kMailboxBytes;
constexpr long kCheckMicroseconds = 100000;  // how often a sleeper looks whether its peer lives

std::string Communicator::segment_name(uint32_t r) const { return name + "." + std::to_string(r); }

// Header, two slots, area, one mailbox for each sending rank. Untouched pages cost nothing.
size_t Communicator::segment_bytes() const {
  return kHeaderBytes + 2 * kSlotBytes + kAreaBytes + ranks * kMailboxStride;
}

Mailbox *Communicator::mailbox(uint32_t from, uint32_t to) const {
  return reinterpret_cast<Mailbox *>(segments_[to] + kHeaderBytes + 2 * kSlotBytes + kAreaBytes +
                                     from * kMailboxStride);
}

Communicator::Communicator(std::string name_, uint32_t ranks_, uint32_t rank_)
    : name(std::move(name_)), ranks(ranks_), rank(rank_) {
  remove_stale_segments();
  if (ranks > std::thread::hardware_concurrency())
    set_oversubscribed();
  for (uint32_t r = 0; r < ranks; r++) {
    char *p = map_segment(segment_name(r), segment_bytes());
    segments_.push_back(p);
    headers_.push_back(reinterpret_cast<Header *>(p));
    slots_.push_back({p + kHeaderBytes, p + kHeaderBytes + kSlotBytes});
    areas_.push_back(p + kHeaderBytes + 2 * kSlotBytes);
  }
  area_ = areas_[rank];
  std::vector<CaptureSessions::Dropped *> dropped;
  for (Header *h : headers_)
    dropped.push_back(&h->dropped_session);
  sessions_.share(std::move(dropped), rank);
  Header &mine = *headers_[rank];
  mine.start_time = process_start_time(getpid());
  mine.pid = getpid();
  meet();
}

Communicator::~Communicator() {
  for (char *p : segments_)
    unmap_segment(p, segment_bytes());
}

void Communicator::meet() {
  Call call{};
  snprintf(call.text, sizeof call.text, "the creation of the communicator");
  try {
    barrier(call);
  } catch (...) {
    remove_segment(segment_name(rank));
    throw;
  }
  // All have mapped everything: the names may go, and a killed rank leaves nothing.
  remove_segment(segment_name(rank));
}

bool Communicator::alive(uint32_t other) const {
  const Header &h = *headers_[other];
  int pid = h.pid;
  if (pid == 0)
    return true;  // has not arrived yet
  return process_start_time(pid) == h.start_time;
}

template <class Peers>
void Communicator::wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers,
                        uint32_t at_least, const char *operation, Peers peers) {
  auto reached = [&](uint32_t value) { return static_cast<int32_t>(value - at_least) >= 0; };
  for (int i = 0; i < 2000 && !oversubscribed(); i++) {
    if (reached(word))
      return;
    spin_once();
  }
  auto start = Clock::now();
  for (;;) {
    sleepers++;
    uint32_t seen = word;
    if (!reached(seen))
      wait_on_word(word, seen, kCheckMicroseconds);
    sleepers--;
    if (reached(word))
      return;
    auto waited = Clock::now() - start;
    if (waited < std::chrono::microseconds(kCheckMicroseconds))
      continue;
    std::string missing;
    for (uint32_t r : peers()) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      if (!alive(r) && !reached(word))
        throw std::runtime_error("HCCL: rank " + std::to_string(r) + " of " +
                                 std::to_string(ranks) + " is dead (process " +
                                 std::to_string(headers_[r]->pid) + "); rank " +
                                 std::to_string(rank) + " is in " + operation);
    }
    if (device_failed())
      throw std::runtime_error(std::string("HCCL: given up, because the device failed, in ") +
                               operation);
    if (waited > std::chrono::seconds(settings().hccl_s))
      throw std::runtime_error("HCCL timeout after " + std::to_string(settings().hccl_s) +
                               " s: rank " + std::to_string(rank) + " of " +
                               std::to_string(ranks) + " in " + operation + " waits for rank " +
                               missing);
  }
}

void Communicator::announce(const Call &call) { headers_[rank]->calls[calls_ & 1] = call; }

// The last one to arrive wakes all others by one word, so that each sleeps at most once.
void Communicator::barrier(const Call &call) {
  uint32_t target = ++barriers_;
  Header &root = *headers_[0];
  headers_[rank]->arrived = target;
  if (root.arrivals.fetch_add(1) + 1 == target * ranks) {
    root.completed = target;
    if (root.sleepers)
      wake_word(root.completed);
    return;
  }
  wait(root.completed, root.sleepers, target, call.text, [&] {
    std::vector<uint32_t> absent;
    for (uint32_t r = 0; r < ranks; r++)
      if (static_cast<int32_t>(headers_[r]->arrived - target) < 0)
        absent.push_back(r);
    return absent;
  });
}

static std::string place_of(const Call &call) {
  return call.session ? "replays it from capture " + std::to_string(call.session)
                      : std::string("runs it outside a graph");
}

void Communicator::compare(const Call &call) const {
  for (uint32_t r = 0; r < ranks; r++) {
    const Call &theirs = headers_[r]->calls[calls_ & 1];
    if (strncmp(theirs.text, call.text, kDescriptionBytes))
      throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) + " runs " +
                               call.text + ", rank " + std::to_string(r) + " runs " + theirs.text);
    if (theirs.session != call.session)
      throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) + " runs " +
                               call.text + " and " + place_of(call) + ", rank " +
                               std::to_string(r) + " " + place_of(theirs) + " of communicator " +
                               name + "; all ranks must replay the graph of one capture");
  }
}

void Communicator::exchange_small(const Call &call, const void *data, size_t bytes) {
  calls_++;
  slot_index_ = calls_ & 1;
  announce(call);
  if (bytes)
    memcpy(slots_[rank][slot_index_], accessible(data), bytes);
  barrier(call);
  compare(call);
}

// ---- point to point: a message travels in chunks through the receiver's mailbox

void Communicator::send(const void *data, size_t bytes, uint32_t to) {
  Mailbox &box = *mailbox(rank, to);
  char *room = reinterpret_cast<char *>(&box) + kHeaderBytes;
  auto *from = static_cast<const char *>(accessible(data));
  size_t sent = 0;
  do {
    wait(box.read, box.sleepers, box.written, "Send", [to] { return std::vector{to}; });
    size_t part = std::min(bytes - sent, kMailboxBytes);
    memcpy(room, from + sent, part);
    box.message_bytes = bytes;
    sent += part;
    box.written++;
    if (box.sleepers)
      wake_word(box.written);
  } while (sent < bytes);
}

void Communicator::receive(void *data, size_t bytes, uint32_t from) {
  Mailbox &box = *mailbox(from, rank);
  const char *room = reinterpret_cast<char *>(&box) + kHeaderBytes;
  auto *to = static_cast<char *>(accessible(data));
  size_t received = 0;
  do {
    wait(box.written, box.sleepers, box.read + 1, "Recv", [from] { return std::vector{from}; });
    if (box.message_bytes != bytes)
      throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) + " receives " +
                               std::to_string(bytes) + " bytes, rank " + std::to_string(from) +
                               " sent " + std::to_string(box.message_bytes));
    size_t part = std::min(bytes - received, kMailboxBytes);
    memcpy(to + received, room, part);
    received += part;
    box.read++;
    if (box.sleepers)
      wake_word(box.read);
  } while (received < bytes);
}

}  // namespace emu::hccl
