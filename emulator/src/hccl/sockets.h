// TCP sockets. HCCL's rules choose the address to listen at. All waits are limited.
#pragma once

#include "hccl/patience.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace emu::hccl {

// The bytes of this structure are sent between hosts.
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

  // Number of transferred bytes.
  mutable uint64_t sent = 0, received = 0;

private:
  int file_ = -1;
};

// Listens at this host's address for HCCL. If HCCL_IF_IP is set, its value is the address.
// Otherwise the allowed network interfaces are sorted by name, and the address of the first
// interface is used. HCCL_SOCKET_IFNAME allows interfaces; without this variable, all interfaces
// are allowed. Docker's interfaces come after all others, and the loopback interface comes last.
// The port is one of HCCL_HOST_SOCKET_PORT_RANGE if this variable is set; otherwise one of the 16
// ports from HCCL_IF_BASE_PORT on; otherwise any free port. Throws if a variable has an invalid
// value.
Socket listen_for_peers(Address *bound);

// While one of these functions waits, it calls `patience` at least every kCheckMs. `peer` is the
// rank for which it waits. If the peer has closed the connection, the peer counts as dead.
Socket connect_to(const Address &address, uint32_t peer, const Patience &patience);
void send_all(const Socket &to, const void *data, size_t bytes, uint32_t peer,
              const Patience &patience);
void receive_all(const Socket &from, void *data, size_t bytes, uint32_t peer,
                 const Patience &patience);

// Sends or receives as many bytes as possible without waiting. Returns -1 if the socket is closed
// or broken.
ptrdiff_t send_some(const Socket &to, const void *data, size_t bytes);
ptrdiff_t receive_some(const Socket &from, void *data, size_t bytes);
bool has_ended(const Socket &socket);  // the peer has closed it, and nothing is left to read

constexpr char kClosed[] = "its connection is closed";

}  // namespace emu::hccl
