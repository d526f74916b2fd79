// If work is aborted, parts of frames and messages stay in the connections between hosts, and no
// operation reads them. So at the end of a life, each rank reports how many bytes it has sent.
// Before the next life begins, the receivers skip the bytes that they have not read.
#include "hccl/links.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>

namespace emu::hccl {

using std::chrono::steady_clock;

constexpr auto kMoment = std::chrono::seconds(2);  // limit for the arrival of earlier data
constexpr Channel kDrained[] = {Channel::Collectives, Channel::Messages};

void Links::end_life(uint32_t life) {
  for (Peer &p : peers_) {
    EndOfLife end{life, {}};
    for (size_t c = 0; c < std::size(kDrained); c++)
      end.sent[c] = p.remote[kDrained[c]].sent;
    // these few bytes always fit into the socket, unless the peer has exited already
    send_some(p.remote[Channel::Lives], &end, sizeof end);
  }
}

void Links::begin_life(uint32_t life) {
  for (Peer &p : peers_)
    hear_end_of_life(p, life);
  for (Peer &p : peers_)
    for (size_t c = 0; c < std::size(kDrained); c++)
      drain(p, kDrained[c], p.ended.sent[c]);
}

void Links::hear_end_of_life(Peer &p, uint32_t life) {
  const Socket &socket = p.remote[Channel::Lives];
  const std::string rank = "rank " + std::to_string(p.remote.rank);
  for (auto end = steady_clock::now() + kMoment; p.ended.life < life;) {
    int waiting = 0;
    if (!ioctl(socket.file(), SIOCINQ, &waiting) && waiting >= int(sizeof p.ended)) {
      receive_some(socket, &p.ended, sizeof p.ended);
      continue;
    }
    if (has_ended(socket))
      throw std::runtime_error(rank + " is dead");
    if (steady_clock::now() > end)
      throw std::runtime_error(rank + " has not aborted its tasks");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Links::drain(const Peer &p, Channel channel, uint64_t until) const {
  const Socket &socket = p.remote[channel];
  char thrown_away[64 << 10];
  for (auto end = steady_clock::now() + kMoment; socket.received < until;) {
    size_t left = std::min<uint64_t>(until - socket.received, sizeof thrown_away);
    ptrdiff_t part = receive_some(socket, thrown_away, left);
    if (part < 0 || steady_clock::now() > end)
      throw std::runtime_error("rank " + std::to_string(p.remote.rank) + " is dead");
    pollfd one{socket.file(), POLLIN, 0};
    if (part == 0)
      poll(&one, 1, kCheckMs);
    else
      end = steady_clock::now() + kMoment;
  }
}

}  // namespace emu::hccl
