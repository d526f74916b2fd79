// TCP sockets: an address to listen at, as HCCL chooses it, and waiting that knows a limit.
#pragma once

#include "hccl/patience.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace emu::hccl {

// Travels between hosts as it is.
struct Address {
  char ip[46];  // text, IPv4 or IPv6
  uint16_t port;
};
std::string text_of(const Address &address);

class Socket {
public:
  Socket() = default;
  explicit Socket(int file) : file_(file) {}
  Socket(Socket &&other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket &operator=(Socket &&other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Socket();
  int file() const { return file_; }
  explicit operator bool() const { return file_ >= 0; }

  // Bytes that have passed, for those who count them.
  mutable uint64_t sent = 0, received = 0;

private:
  int file_ = -1;
};

// At this host's address for HCCL: HCCL_IF_IP, else that of the first network interface that
// HCCL_SOCKET_IFNAME admits, else that of the first one by name, where those of docker come behind
// all others and the loopback last. At a port of HCCL_HOST_SOCKET_PORT_RANGE, else one of the 16
// from HCCL_IF_BASE_PORT, else any. Throws what is wrong with them.
Socket listen_for_peers(Address *bound);

// All of these never block for longer than kCheckMs without asking `patience`; `peer` is whom they
// wait for. A connection that the peer has closed is its death.
Socket connect_to(const Address &address, uint32_t peer, const Patience &patience);
void send_all(const Socket &to, const void *data, size_t bytes, uint32_t peer,
              const Patience &patience);
void receive_all(const Socket &from, void *data, size_t bytes, uint32_t peer,
                 const Patience &patience);

// What the socket takes or has at once: -1 if it is closed or broken.
ptrdiff_t send_some(const Socket &to, const void *data, size_t bytes);
ptrdiff_t receive_some(const Socket &from, void *data, size_t bytes);
bool has_ended(const Socket &socket);  // the peer has closed it, and nothing is left to read

constexpr char kClosed[] = "its connection is closed";

}  // namespace emu::hccl
