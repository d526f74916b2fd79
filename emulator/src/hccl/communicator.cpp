#include "hccl/communicator.h"

#include "hccl/shared_memory.h"
#include "runtime/bad_memory.h"
#include "runtime/services.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#include <unistd.h>

namespace emu::hccl {

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kMailboxStride = kHeaderBytes + kMailboxBytes;

std::string Communicator::segment_name(uint32_t r) const { return memory_ + "." + std::to_string(r); }

// A segment contains a header, two slots, an area, and one mailbox for each sending rank. Memory
// pages that are never accessed use no memory.
size_t Communicator::segment_bytes() const {
  return kHeaderBytes + 2 * kSlotBytes + kAreaBytes + ranks * kMailboxStride;
}

Mailbox *Communicator::mailbox(uint32_t from, uint32_t to) const {
  return reinterpret_cast<Mailbox *>(segments_[to] + kHeaderBytes + 2 * kSlotBytes + kAreaBytes +
                                     from * kMailboxStride);
}

bool Communicator::is_here(uint32_t r) const {
  return std::find(here_.begin(), here_.end(), r) != here_.end();
}

Communicator::Communicator(const RootInfo &root, uint32_t ranks, uint32_t rank, int device)
    : Communicator(root, ranks, rank, device, meet(root, ranks, rank)) {}

Communicator::Communicator(const RootInfo &root, uint32_t ranks_, uint32_t rank_, int device_,
                           Company company)
    : name(root.name), ranks(ranks_), rank(rank_), device(device_), memory_(company.memory),
      here_(company.here), links_(rank, ranks, std::move(company.elsewhere), is_destroyed) {
  if (here_.size() > std::thread::hardware_concurrency())
    set_oversubscribed();
  std::vector<CaptureSessions::Dropped *> dropped;
  for (uint32_t r = 0; r < ranks; r++) {
    char *p = is_here(r) ? map_segment(segment_name(r), segment_bytes())
                         : map_private(segment_bytes());
    segments_.push_back(p);
    headers_.push_back(reinterpret_cast<Header *>(p));
    slots_[0].push_back(p + kHeaderBytes);
    slots_[1].push_back(p + kHeaderBytes + kSlotBytes);
    areas_.push_back(p + kHeaderBytes + 2 * kSlotBytes);
    dropped.push_back(&headers_[r]->dropped_session);
  }
  sessions_.share(std::move(dropped), rank);
  Header &mine = *headers_[rank];
  mine.start_time = process_start_time(getpid());
  mine.pid = getpid();
  arrive(root);
}

Communicator::~Communicator() {
  for (char *p : segments_)
    unmap_segment(p, segment_bytes());
}

void Communicator::arrive(const RootInfo &root) {
  Call call{};
  snprintf(call.text, sizeof call.text, "the creation of the communicator");
  try {
    barrier(call);
  } catch (...) {
    remove_segment(segment_name(rank));
    forget(root);
    throw;
  }
  // All ranks have mapped all segments, so the names of the segments are no longer needed. They are
  // removed now, so that a rank that is killed later leaves no names behind.
  remove_segment(segment_name(rank));
  forget(root);
}

bool Communicator::alive(uint32_t other) const {
  const Header &h = *headers_[other];
  int pid = h.pid;
  if (pid == 0)
    return true;  // the rank has not arrived yet
  return process_start_time(pid) == h.start_time;
}

template <class Peers>
void Communicator::wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers,
                        uint32_t at_least, const char *operation, Peers peers) {
  Patience patience(rank, ranks, operation, &is_destroyed);
  wait_until(word, sleepers, at_least, [&] {
    patience.ask(peers(), [&](uint32_t r) {
      bool has_come = static_cast<int32_t>(word - at_least) >= 0;
      return alive(r) || has_come ? "" : "process " + std::to_string(headers_[r]->pid);
    });
  });
}

// A barrier of the ranks on this host. The last rank that arrives wakes all other ranks through a
// single futex word, so each rank sleeps at most once.
void Communicator::barrier(const Call &call) {
  uint32_t target = ++barriers_;
  Barriers &first = barriers_of(here_[0]);
  barriers_of(rank).arrived = target;
  // Both counters continue at 0 after 2^32 - 1, so the comparison still works.
  if (first.arrivals.fetch_add(1) + 1 == static_cast<uint32_t>(target * here_.size())) {
    first.completed = target;
    if (first.sleepers)
      wake_word(first.completed);
    return;
  }
  wait(first.completed, first.sleepers, target, call.text, [&] {
    std::vector<uint32_t> absent;
    for (uint32_t r : here_)
      if (static_cast<int32_t>(barriers_of(r).arrived - target) < 0)
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

// This rank exchanges data with other hosts while the ranks of this host wait at the barrier.
void Communicator::exchange(const Call &call, const std::vector<char *> &rooms, const void *data,
                            size_t bytes) {
  int turn = ++calls_ & 1;
  Call &mine = headers_[rank]->calls[turn];
  mine = call;
  mine.arrival_ns = arrival_ns();
  mine.cost_ns = kernel_ns();
  if (bytes)
    memcpy(rooms[rank], accessible(data), bytes);
  check_memory();
  links_.offer(mine, rooms[rank], bytes);
  barrier(call);
  size_t come = links_.collect(
      [&](uint32_t r) { return Links::Place{&headers_[r]->calls[turn], rooms[r]}; });
  count_socket_bytes(device, come);
  compare(call);
  if (settings().timed)
    exchange_clocks();
}

void Communicator::exchange_clocks() const {
  int64_t latest_ns = 0, cost_ns = 0;
  for (const Header *header : headers_) {
    const Call &theirs = header->calls[calls_ & 1];
    latest_ns = std::max(latest_ns, theirs.arrival_ns);
    cost_ns = std::max(cost_ns, theirs.cost_ns);
  }
  meet_ranks(latest_ns, cost_ns);
}

void Communicator::exchange_small(const Call &call, const void *data, size_t bytes) {
  slot_index_ = (calls_ + 1) & 1;
  exchange(call, slots_[slot_index_], data, bytes);
}

void Communicator::hear_dropped() {
  links_.hear([&](uint32_t r, uint32_t number) {
    CaptureSessions::Dropped &theirs = headers_[r]->dropped_session;
    theirs = std::max(theirs.load(), number);
  });
}

// ---- aborts

static void clear(std::initializer_list<std::atomic<uint32_t> *> words) {
  for (std::atomic<uint32_t> *word : words)
    *word = 0;
}

void Communicator::end_life() {
  uint32_t next = life_ + 1;
  Header &mine = *headers_[rank];
  if (mine.lives_over == next)
    return;  // aborted again before it was resumed
  Barriers &b = mine.barriers[next & 1];
  clear({&b.arrived, &b.arrivals, &b.completed, &b.sleepers});
  for (uint32_t r : here_) {
    Mailbox::Progress &chunks = mailbox(r, rank)->progress[next & 1];
    clear({&chunks.written, &chunks.read, &chunks.sleepers});
  }
  mine.lives_over = next;
  links_.end_life(next);
}

// HCCL does not check whether the other ranks have aborted. A rank that resumes before the other
// ranks have aborted loses data, and the error appears much later. The emulator refuses to resume
// so early.
void Communicator::resume() {
  std::string what = "HcclCommResume of communicator " + name + " on rank " + std::to_string(rank);
  if (headers_[rank]->lives_over != life_ + 1)
    throw std::runtime_error(what + ": the device's tasks were not aborted");
  for (uint32_t r : here_)
    if (headers_[r]->lives_over < life_ + 1)
      throw std::runtime_error(what + ": rank " + std::to_string(r) +
                               (alive(r) ? " has not aborted its tasks" : " is dead"));
  try {
    links_.begin_life(life_ + 1);
  } catch (const std::exception &e) {
    throw std::runtime_error(what + ": " + e.what());
  }
  barriers_ = calls_ = 0;
  slot_index_ = 0;
  life_++;
  is_suspended_ = false;
}

void Communicator::check_usable() const {
  if (is_destroyed)
    throw std::runtime_error("communicator " + name + " was destroyed");
  if (is_suspended_)
    throw std::runtime_error("communicator " + name + " is suspended");
}

// ---- point to point: within a host, a message passes in chunks through the receiver's mailbox

void Communicator::send(const void *data, size_t bytes, uint32_t to) {
  if (!is_here(to))
    return links_.send(accessible(data), bytes, to);
  Mailbox &box = *mailbox(rank, to);
  Mailbox::Progress &chunks = box.progress[life_ & 1];
  char *room = reinterpret_cast<char *>(&box) + kHeaderBytes;
  auto *from = static_cast<const char *>(accessible(data));
  size_t sent = 0;
  do {
    wait(chunks.read, chunks.sleepers, chunks.written, "Send", [to] { return std::vector{to}; });
    size_t part = std::min(bytes - sent, kMailboxBytes);
    memcpy(room, from + sent, part);
    check_memory();
    box.message_bytes = bytes;
    box.sent_ns = arrival_ns();
    sent += part;
    chunks.written++;
    if (chunks.sleepers)
      wake_word(chunks.written);
  } while (sent < bytes);
}

void Communicator::receive(void *data, size_t bytes, uint32_t from) {
  if (!is_here(from)) {
    links_.receive(accessible(data), bytes, from);
    return count_socket_bytes(device, bytes);
  }
  Mailbox &box = *mailbox(from, rank);
  Mailbox::Progress &chunks = box.progress[life_ & 1];
  const char *room = reinterpret_cast<char *>(&box) + kHeaderBytes;
  auto *to = static_cast<char *>(accessible(data));
  size_t received = 0;
  do {
    wait(chunks.written, chunks.sleepers, chunks.read + 1, "Recv", [from] { return std::vector{from}; });
    check_message_bytes(rank, bytes, from, box.message_bytes);
    meet_ranks(box.sent_ns, 0);
    size_t part = std::min(bytes - received, kMailboxBytes);
    memcpy(to + received, room, part);
    received += part;
    chunks.read++;
    if (chunks.sleepers)
      wake_word(chunks.read);
  } while (received < bytes);
}

}  // namespace emu::hccl
