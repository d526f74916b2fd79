#include "hccl/links.h"

#include <cstring>
#include <stdexcept>
#include <thread>

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

namespace emu::hccl {

Links::Links(uint32_t rank, uint32_t ranks, std::vector<RemoteRank> remote,
             const std::atomic<bool> &is_destroyed)
    : rank_(rank), ranks_(ranks), is_destroyed_(is_destroyed) {
  for (RemoteRank &r : remote)
    peers_.emplace_back(std::move(r));
}

// Bytes that were sent to set up the connection are not counted.
Links::Peer::Peer(RemoteRank r) : remote(std::move(r)) {
  for (const Socket &socket : remote.sockets)
    socket.sent = socket.received = 0;
}

const RemoteRank &Links::remote(uint32_t rank) const {
  for (const Peer &p : peers_)
    if (p.remote.rank == rank)
      return p.remote;
  throw std::runtime_error("HCCL: there is no rank " + std::to_string(rank) + " of " +
                           std::to_string(ranks_));
}

// ---- collectives: a frame that describes the call, and the offered bytes

size_t Links::to_send(const Peer &p) const {
  size_t all = sizeof(Frame) + (p.runs_other ? 0 : frame_.bytes);
  return all > p.sent ? all - p.sent : 0;
}

size_t Links::to_receive(const Peer &p) const {
  return p.runs_other ? 0 : sizeof(Frame) + frame_.bytes - p.received;
}

// Returns the bytes of a frame's two parts that are not yet sent or received, from byte `done` on.
static msghdr from_byte(iovec (&parts)[2], size_t done) {
  for (iovec &part : parts) {
    size_t skipped = std::min(done, part.iov_len);
    part.iov_base = static_cast<char *>(part.iov_base) + skipped;
    part.iov_len -= skipped;
    done -= skipped;
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  return message;
}

void Links::push(Peer &p) {
  iovec parts[2]{{&frame_, sizeof frame_},
                 {const_cast<char *>(data_), p.runs_other ? 0 : frame_.bytes}};
  msghdr message = from_byte(parts, p.sent);
  ssize_t part = sendmsg(p.remote[Channel::Collectives].file(), &message,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
  if (part >= 0) {
    p.sent += part;
    p.remote[Channel::Collectives].sent += part;
  } else if (errno != EAGAIN && errno != EINTR) {
    p.sent = sizeof frame_ + frame_.bytes;  // the peer has exited; a later read reports this
  }
}

void Links::pull(Peer &p, const Place &place, const Patience &patience) {
  iovec parts[2]{{&p.frame, sizeof p.frame}, {place.data, frame_.bytes}};
  msghdr message = from_byte(parts, p.received);
  ssize_t part = recvmsg(p.remote[Channel::Collectives].file(), &message, MSG_DONTWAIT);
  if (part < 0 && (errno == EAGAIN || errno == EINTR))
    return;
  if (part <= 0)
    patience.is_dead(p.remote.rank, kClosed);
  bool was_known = p.received >= sizeof p.frame;
  p.received += part;
  p.remote[Channel::Collectives].received += part;
  if (was_known || p.received < sizeof p.frame)
    return;
  *place.call = p.frame.call;
  p.runs_other = strncmp(p.frame.call.text, frame_.call.text, kDescriptionBytes) ||
                 p.frame.call.session != frame_.call.session;
  if (!p.runs_other && p.frame.bytes != frame_.bytes)
    throw std::runtime_error("HCCL mismatch: in " + std::string(frame_.call.text) + " rank " +
                             std::to_string(rank_) + " offers " + std::to_string(frame_.bytes) +
                             " bytes, rank " + std::to_string(p.remote.rank) + " " +
                             std::to_string(p.frame.bytes));
}

void Links::offer(const Call &call, const char *data, size_t bytes) {
  frame_ = {call, static_cast<uint32_t>(bytes)};
  data_ = data;
  for (Peer &p : peers_) {
    p.sent = p.received = 0;
    p.runs_other = false;
    push(p);
  }
}

size_t Links::collect(const PlaceOf &place) {
  if (peers_.empty())
    return 0;
  Patience patience(rank_, ranks_, frame_.call.text, &is_destroyed_);
  std::vector<pollfd> files;
  std::vector<Peer *> open;
  for (;;) {
    files.clear();
    open.clear();
    std::vector<uint32_t> absent;
    for (Peer &p : peers_) {
      int wanted = (to_receive(p) ? POLLIN : 0) | (to_send(p) ? POLLOUT : 0);
      if (!wanted)
        continue;
      files.push_back({p.remote[Channel::Collectives].file(), static_cast<short>(wanted), 0});
      open.push_back(&p);
      absent.push_back(p.remote.rank);
    }
    if (open.empty())
      break;
    if (poll(files.data(), files.size(), kCheckMs) <= 0)
      patience.ask(absent);
    for (size_t i = 0; i < open.size(); i++) {
      if (to_receive(*open[i]) && files[i].revents & (POLLIN | POLLHUP | POLLERR))
        pull(*open[i], place(open[i]->remote.rank), patience);
      if (to_send(*open[i]) && files[i].revents & (POLLOUT | POLLHUP | POLLERR))
        push(*open[i]);
    }
  }
  size_t bytes = 0;
  for (const Peer &p : peers_)
    bytes += p.received;
  return bytes;
}

// ---- messages: the number of bytes, and then the bytes

void check_message_bytes(uint32_t rank, size_t wanted, uint32_t from, size_t sent) {
  if (wanted != sent)
    throw std::runtime_error("HCCL mismatch: rank " + std::to_string(rank) + " receives " +
                             std::to_string(wanted) + " bytes, rank " + std::to_string(from) +
                             " sent " + std::to_string(sent));
}

void Links::send(const void *data, size_t bytes, uint32_t to) {
  Patience patience(rank_, ranks_, "Send", &is_destroyed_);
  const Socket &socket = remote(to)[Channel::Messages];
  uint64_t announced = bytes;
  send_all(socket, &announced, sizeof announced, to, patience);
  send_all(socket, data, bytes, to, patience);
}

void Links::receive(void *data, size_t bytes, uint32_t from) {
  Patience patience(rank_, ranks_, "Recv", &is_destroyed_);
  const Socket &socket = remote(from)[Channel::Messages];
  uint64_t announced = 0;
  receive_all(socket, &announced, sizeof announced, from, patience);
  check_message_bytes(rank_, bytes, from, announced);
  receive_all(socket, data, bytes, from, patience);
}

// ---- notes: numbers that stay on the other host until the peer reads them

void Links::tell(uint32_t number) {
  using std::chrono::steady_clock;
  for (Peer &p : peers_)
    if (send_some(p.remote[Channel::Notes], &number, sizeof number) < 0)
      p.is_silent = true;
  auto end = steady_clock::now() + std::chrono::seconds(1);
  for (Peer &p : peers_) {
    int unconfirmed = 0;
    while (!p.is_silent && !ioctl(p.remote[Channel::Notes].file(), SIOCOUTQ, &unconfirmed) &&
           unconfirmed) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      p.is_silent = steady_clock::now() > end;
    }
  }
}

void Links::hear(const std::function<void(uint32_t, uint32_t)> &told) {
  for (const Peer &p : peers_) {
    const Socket &socket = p.remote[Channel::Notes];
    int waiting = 0;
    for (uint32_t number;
         ioctl(socket.file(), SIOCINQ, &waiting) == 0 && waiting >= int(sizeof number) &&
         receive_some(socket, &number, sizeof number) == sizeof number;)
      told(p.remote.rank, number);
  }
}

}  // namespace emu::hccl
