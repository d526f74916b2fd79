// The exchange of a rank with ranks on other hosts, over sockets.
#pragma once

#include "hccl/call.h"
#include "hccl/meeting.h"

#include <atomic>
#include <functional>
#include <list>

namespace emu::hccl {

// Throws if a message does not have the length that its receiver expects.
void check_message_bytes(uint32_t rank, size_t wanted, uint32_t from, size_t sent);

class Links {
public:
  // The memory into which another rank's call and its data are written.
  struct Place {
    Call *call;
    char *data;
  };
  using PlaceOf = std::function<Place(uint32_t rank)>;

  // `is_destroyed` becomes true when the communicator is destroyed.
  Links(uint32_t rank, uint32_t ranks, std::vector<RemoteRank> remote,
        const std::atomic<bool> &is_destroyed);

  bool empty() const { return peers_.empty(); }

  // A collective has two halves: `offer` and `collect`. Between these two calls, the ranks of this
  // host meet at a barrier. The offered data must stay valid until the end of `collect`. If a peer
  // runs another call, this rank still receives the description of that call.
  void offer(const Call &call, const char *data, size_t bytes);
  size_t collect(const PlaceOf &place);  // returns the number of received bytes

  void send(const void *data, size_t bytes, uint32_t to);
  void receive(void *data, size_t bytes, uint32_t from);

  // Sends a number to all ranks on other hosts. When this returns, each host that can be reached
  // has received the number.
  void tell(uint32_t number);
  void hear(const std::function<void(uint32_t rank, uint32_t number)> &told);

  // To be called when all tasks of this rank have ended. This ends a life of the communicator.
  // Reports to each other rank that the life has ended, and how many bytes this rank has sent to
  // that rank.
  void end_life(uint32_t life);
  // Discards data that other ranks sent in previous lives. Throws if a rank has not ended the
  // previous life; the error names these ranks.
  void begin_life(uint32_t life);

private:
  struct Frame {
    Call call;
    uint32_t bytes;
  };
  struct EndOfLife {
    uint32_t life;
    uint64_t sent[2];  // bytes of collectives and of messages, in all lives
  };
  struct Peer {
    RemoteRank remote;
    EndOfLife ended{};
    Frame frame{};
    size_t sent = 0, received = 0;
    bool runs_other = false;
    std::atomic<bool> is_silent{false};  // the peer did not confirm a note

    explicit Peer(RemoteRank r);
  };
  const uint32_t rank_, ranks_;
  const std::atomic<bool> &is_destroyed_;
  std::list<Peer> peers_;
  Frame frame_;
  const char *data_ = nullptr;

  const RemoteRank &remote(uint32_t rank) const;
  void hear_end_of_life(Peer &peer, uint32_t life);
  void drain(const Peer &peer, Channel channel, uint64_t until) const;
  void push(Peer &peer);
  void pull(Peer &peer, const Place &place, const Patience &patience);
  size_t to_send(const Peer &peer) const;
  size_t to_receive(const Peer &peer) const;
};

}  // namespace emu::hccl
