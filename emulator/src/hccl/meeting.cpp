#include "hccl/meeting.h"

#include "hccl/door.h"
#include "hccl/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include <sys/random.h>
#include <unistd.h>

namespace emu::hccl {

namespace {

constexpr uint64_t kMark = 0x3230'4c43'4348'4d45;  // marks the format of a root info
constexpr char kCreation[] = "the creation of the communicator";
constexpr int kLobbyMs = 5;  // interval at which the listening root checks the lobby

template <size_t N> void copy_text(char (&to)[N], const std::string &text) {
  snprintf(to, N, "%s", text.c_str());
}

Secret new_secret() {
  Secret secret;
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
    throw std::runtime_error(std::string("HCCL: getrandom: ") + strerror(errno));
  return secret;
}

// The roots in this process for which not all ranks have arrived yet.
std::mutex listening_mutex;
std::map<std::string, Socket> listening;

Socket take_listener(const std::string &name) {
  std::lock_guard lock(listening_mutex);
  auto found = listening.find(name);
  if (found == listening.end())
    return {};
  Socket listener = std::move(found->second);
  listening.erase(found);
  return listener;
}

void check_ranks(uint32_t rank, uint32_t ranks, const std::string &other, uint32_t others_ranks) {
  if (ranks != others_ranks)
    throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) +
                             " creates a communicator of " + std::to_string(ranks) + " ranks, " +
                             other + " one of " + std::to_string(others_ranks));
}

// The meeting place, in the root's memory, of all ranks that share this memory.
class Lobby {
public:
  struct Guest {
    std::atomic<int32_t> pid;  // 0: absent, -1: on another host
    std::atomic<uint64_t> start_time;
  };

  Lobby(const std::string &memory, uint32_t ranks)
      : name_(memory + ".lobby"), bytes_(sizeof(Head) + ranks * (sizeof(Guest) + sizeof(Place))),
        ranks_(ranks), at_(map_segment(name_, bytes_)) {}
  ~Lobby() { unmap_segment(at_, bytes_); }
  Lobby(const Lobby &) = delete;

  struct Head {
    std::atomic<uint32_t> is_open, sleepers;
    std::atomic<uint32_t> root, ranks;
  };
  Head &head() { return *reinterpret_cast<Head *>(at_); }
  Guest &guest(uint32_t r) { return reinterpret_cast<Guest *>(at_ + sizeof(Head))[r]; }
  Place *places() { return reinterpret_cast<Place *>(&guest(ranks_)); }

  void enter(uint32_t rank) {
    uint32_t agreed = 0;
    if (!head().ranks.compare_exchange_strong(agreed, ranks_))
      check_ranks(rank, ranks_, "another rank", agreed);
    guest(rank).start_time = process_start_time(getpid());
    guest(rank).pid = getpid();
  }
  std::vector<uint32_t> absent() {
    std::vector<uint32_t> found;
    for (uint32_t r = 0; r < ranks_; r++)
      if (guest(r).pid == 0)
        found.push_back(r);
    return found;
  }
  std::string death_of(uint32_t r) {
    int pid = guest(r).pid;
    if (pid <= 0 || process_start_time(pid) == guest(r).start_time)
      return "";
    return "process " + std::to_string(pid);
  }
  void remove() { remove_segment(name_); }

private:
  const std::string name_;
  const size_t bytes_;
  const uint32_t ranks_;
  char *const at_;
};

using Roster = std::vector<Place>;

// The root collects the places of all ranks, and sends the list of places to all ranks.
Roster gather(const RootInfo &root, uint32_t ranks, uint32_t rank, Socket listener,
              const Patience &patience) {
  Lobby lobby(root.memory, ranks);
  lobby.head().root = rank;
  Roster roster(ranks);
  for (Place &place : roster)
    copy_text(place.memory, root.memory);
  Door door(std::move(listener), root.question);
  std::map<uint32_t, Socket> joined;
  auto admit = [&](const Hello &h, Socket socket) {
    if (!h.is_joining)
      return;
    check_ranks(rank, ranks, "rank " + std::to_string(h.rank), h.ranks);
    if (h.rank >= ranks || lobby.guest(h.rank).pid)
      return;
    lobby.guest(h.rank).pid = -1;
    roster[h.rank] = h.place;
    roster[h.rank].memory[sizeof h.place.memory - 1] = 0;
    joined[h.rank] = std::move(socket);
  };
  try {
    lobby.enter(rank);
    while (!lobby.absent().empty()) {
      door.attend(kLobbyMs, admit);
      for (auto &[r, socket] : joined)
        if (has_ended(socket))
          patience.is_dead(r, kClosed);
      patience.ask(lobby.absent());
    }
  } catch (...) {
    lobby.remove();
    throw;
  }
  lobby.remove();  // all ranks of this host have mapped it
  std::copy(roster.begin(), roster.end(), lobby.places());
  lobby.head().is_open = 1;
  wake_word(lobby.head().is_open);
  for (auto &[r, socket] : joined) {
    send_all(socket, root.answer.data(), root.answer.size(), r, patience);
    send_all(socket, roster.data(), ranks * sizeof(Place), r, patience);
  }
  return roster;
}

Roster wait_in_lobby(const RootInfo &root, uint32_t ranks, uint32_t rank,
                     const Patience &patience) {
  Lobby lobby(root.memory, ranks);
  lobby.enter(rank);
  wait_until(lobby.head().is_open, lobby.head().sleepers, 1, [&] {
    auto peers = lobby.absent();
    if (peers.empty())
      peers.push_back(lobby.head().root);
    patience.ask(peers, [&](uint32_t r) { return lobby.death_of(r); });
  });
  return Roster(lobby.places(), lobby.places() + ranks);
}

void hear_answer(const Socket &from, const RootInfo &root, uint32_t peer,
                 const Patience &patience) {
  Secret answer;
  receive_all(from, answer.data(), answer.size(), peer, patience);
  if (!equal_in_constant_time(answer, root.answer))
    throw std::runtime_error("HCCL: who listens where rank " + std::to_string(peer) +
                             " should is no rank of this communicator");
}

Roster join(const RootInfo &root, Hello hello, const Patience &patience) {
  hello.is_joining = 1;
  constexpr uint32_t kRoot = 0;  // for error messages: the rank that makes a root info is rank 0
  Socket socket = connect_to(root.address, kRoot, patience);
  send_all(socket, &hello, sizeof hello, kRoot, patience);
  hear_answer(socket, root, kRoot, patience);
  Roster roster(hello.ranks);
  receive_all(socket, roster.data(), hello.ranks * sizeof(Place), kRoot, patience);
  for (Place &place : roster)
    place.memory[sizeof place.memory - 1] = place.address.ip[sizeof place.address.ip - 1] = 0;
  return roster;
}

// Decides which of two ranks without shared memory connects to the other. A rank that shares the
// root's memory does not listen, so it connects. In all other cases the lower rank connects.
bool connects(const Roster &roster, uint32_t rank, uint32_t peer) {
  if (!roster[rank].address.port || !roster[peer].address.port)
    return !roster[rank].address.port;
  return rank < peer;
}

// Opens one connection per channel with every rank on another host. First this rank begins to
// connect; the system does this without the help of the peer's process. Then this rank accepts the
// connections of other ranks, and replies to them. At last it reads the replies to its own
// connections. So ranks never wait for each other in a ring.
std::vector<RemoteRank> connect_all(const RootInfo &root, const Roster &roster, Hello hello,
                                    Socket listener, const Patience &patience) {
  std::map<uint32_t, RemoteRank> remote;
  std::vector<uint32_t> to_come;  // a peer appears once per channel
  for (uint32_t r = 0; r < roster.size(); r++) {
    if (!strcmp(roster[r].memory, roster[hello.rank].memory))
      continue;
    remote[r].rank = r;
    for (size_t c = 0; c < kChannels; c++) {
      hello.channel = Channel(c);
      if (!connects(roster, hello.rank, r)) {
        to_come.push_back(r);
        continue;
      }
      remote[r].sockets[c] = connect_to(roster[r].address, r, patience);
      send_all(remote[r].sockets[c], &hello, sizeof hello, r, patience);
    }
  }
  Door door(std::move(listener), root.question);
  while (!to_come.empty()) {
    door.attend(kCheckMs, [&](const Hello &h, Socket socket) {
      auto due = std::find(to_come.begin(), to_come.end(), h.rank);
      size_t c = static_cast<size_t>(h.channel);
      if (h.is_joining || due == to_come.end() || c >= kChannels || remote[h.rank].sockets[c])
        return;
      send_all(socket, root.answer.data(), root.answer.size(), h.rank, patience);
      remote[h.rank].sockets[c] = std::move(socket);
      to_come.erase(due);
    });
    patience.ask(to_come);
  }
  std::vector<RemoteRank> all;
  for (auto &[r, peer] : remote) {
    for (size_t c = 0; c < kChannels && connects(roster, hello.rank, r); c++)
      hear_answer(peer.sockets[c], root, r, patience);
    all.push_back(std::move(peer));
  }
  return all;
}

}  // namespace

RootInfo new_root() {
  RootInfo root{};
  root.mark = kMark;
  remove_stale_segments();
  std::string name = new_name();
  copy_text(root.name, name);
  Socket listener = listen_for_peers(&root.address);
  root.question = new_secret();
  root.answer = new_secret();
  copy_text(root.memory, name_on_this_host(name));
  std::lock_guard lock(listening_mutex);
  listening[name] = std::move(listener);
  return root;
}

static Roster find_all(const RootInfo &root, Hello hello, Socket root_listener, Socket *listener,
                       const Patience &patience) {
  if (root_listener)
    return gather(root, hello.ranks, hello.rank, std::move(root_listener), patience);
  if (!strcmp(hello.place.memory, root.memory))
    return wait_in_lobby(root, hello.ranks, hello.rank, patience);
  *listener = listen_for_peers(&hello.place.address);
  return join(root, hello, patience);
}

Company meet(const RootInfo &root, uint32_t ranks, uint32_t rank) {
  if (root.mark != kMark)
    throw std::runtime_error("HCCL: the root info was not made by this version of the emulator");
  Patience patience(rank, ranks, kCreation);
  Company company{name_on_this_host(root.name), {}, {}};
  Hello hello{root.question, 0, rank, ranks, Channel::Collectives, {}};
  copy_text(hello.place.memory, company.memory);
  Socket root_listener = take_listener(root.name), listener;
  const bool root_forgets = company.memory == root.memory && !root_listener;
  try {
    Roster roster = find_all(root, hello, std::move(root_listener), &listener, patience);
    for (uint32_t r = 0; r < ranks; r++)
      if (company.memory == roster[r].memory)
        company.here.push_back(r);
    if (company.here.size() < ranks)
      company.elsewhere = connect_all(root, roster, hello, std::move(listener), patience);
  } catch (...) {
    if (!root_forgets)
      forget(root);
    throw;
  }
  return company;
}

void forget(const RootInfo &root) { forget_name_on_this_host(root.name); }

}  // namespace emu::hccl
