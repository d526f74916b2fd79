// What a rank exchanges over sockets with those of other hosts.
#pragma once

#include "hccl/call.h"
#include "hccl/meeting.h"

#include <atomic>
#include <functional>
#include <list>

namespace emu::hccl {

// A message has to be as long as its receiver says. Throws.
void check_message_bytes(uint32_t rank, size_t wanted, uint32_t from, size_t sent);

class Links {
public:
  // Where what a rank runs and offers is to be put.
  struct Place {
    Call *call;
    char *data;
  };
  using PlaceOf = std::function<Place(uint32_t rank)>;

  Links(uint32_t rank, uint32_t ranks, std::vector<RemoteRank> remote);

  bool empty() const { return peers_.empty(); }

  // A collective in two halves, between which the ranks of this host meet. What is offered has to
  // stay until the end. A peer that runs another call is heard to the end of its description.
  void offer(const Call &call, const char *data, size_t bytes);
  size_t collect(const PlaceOf &place);  // returns the bytes that have come

  void send(const void *data, size_t bytes, uint32_t to);
  void receive(void *data, size_t bytes, uint32_t from);

  // A number for all others, which lies in their hosts when this returns, if they can be reached.
  void tell(uint32_t number);
  void hear(const std::function<void(uint32_t rank, uint32_t number)> &told);

private:
  struct Frame {
    Call call;
    uint32_t bytes;
  };
  struct Peer {
    RemoteRank remote;
    Frame frame{};
    size_t sent = 0, received = 0;
    bool runs_other = false;
    std::atomic<bool> is_silent{false};  // did not confirm a note

    explicit Peer(RemoteRank r) : remote(std::move(r)) {}
  };
  const uint32_t rank_, ranks_;
  std::list<Peer> peers_;
  Frame frame_;
  const char *data_ = nullptr;

  const RemoteRank &remote(uint32_t rank) const;
  void push(Peer &peer);
  void pull(Peer &peer, const Place &place, const Patience &patience);
  size_t to_send(const Peer &peer) const;
  size_t to_receive(const Peer &peer) const;
};

}  // namespace emu::hccl
