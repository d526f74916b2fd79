#include "hccl/sockets.h"

#include "hccl/interfaces.h"

#include <cstring>
#include <stdexcept>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace emu::hccl {

std::string text_of(const Address &a) {
  std::string ip = a.ip;
  return (strchr(a.ip, ':') ? "[" + ip + "]" : ip) + ":" + std::to_string(a.port);
}

Socket::~Socket() {
  if (file_ >= 0)
    close(file_);
}

namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  explicit SocketAddress(const Address &a) {
    auto *four = reinterpret_cast<sockaddr_in *>(&storage);
    auto *six = reinterpret_cast<sockaddr_in6 *>(&storage);
    if (inet_pton(AF_INET, a.ip, &four->sin_addr) == 1) {
      four->sin_family = AF_INET;
      four->sin_port = htons(a.port);
      bytes = sizeof *four;
    } else if (inet_pton(AF_INET6, a.ip, &six->sin6_addr) == 1) {
      six->sin6_family = AF_INET6;
      six->sin6_port = htons(a.port);
      bytes = sizeof *six;
    } else {
      throw std::runtime_error("HCCL: " + std::string(a.ip) + " is no address");
    }
  }
  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&storage); }
  Socket socket() const {
    int file = ::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (file < 0)
      throw std::runtime_error(std::string("HCCL: socket: ") + strerror(errno));
    int yes = 1;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return Socket(file);
  }
};

void wait_for(const Socket &socket, short events) {
  pollfd one{socket.file(), events, 0};
  poll(&one, 1, kCheckMs);
}

}  // namespace

Socket listen_for_peers(Address *bound) {
  std::string ip = host_ip();
  snprintf(bound->ip, sizeof bound->ip, "%s", ip.c_str());
  int error = 0;
  auto ports = host_ports();
  for (uint16_t port : ports) {
    bound->port = port;
    SocketAddress address(*bound);
    Socket socket = address.socket();
    int yes = 1;
    setsockopt(socket.file(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(socket.file(), address.get(), address.bytes) || listen(socket.file(), SOMAXCONN)) {
      error = errno;
      continue;
    }
    sockaddr_in6 got{};  // the port is at the same offset in both families
    socklen_t bytes = sizeof got;
    getsockname(socket.file(), reinterpret_cast<sockaddr *>(&got), &bytes);
    bound->port = ntohs(got.sin6_port);
    return socket;
  }
  std::string tried = ports.size() == 1 && !ports[0] ? "any port"
                      : std::to_string(ports.size()) + " ports from " + std::to_string(ports[0]);
  throw std::runtime_error("HCCL cannot listen at " + ip + ", " + tried + ": " + strerror(error) +
                           "; see HCCL_IF_IP, HCCL_SOCKET_IFNAME and HCCL_HOST_SOCKET_PORT_RANGE");
}

// If the peer does not listen yet, or its network is not up yet, this function tries again.
Socket connect_to(const Address &to, uint32_t peer, const Patience &patience) {
  SocketAddress address(to);
  for (;;) {
    Socket socket = address.socket();
    int error = connect(socket.file(), address.get(), address.bytes) ? errno : 0;
    while (error == EINPROGRESS) {
      pollfd one{socket.file(), POLLOUT, 0};
      if (poll(&one, 1, kCheckMs) > 0) {
        socklen_t bytes = sizeof error;
        getsockopt(socket.file(), SOL_SOCKET, SO_ERROR, &error, &bytes);
      } else {
        patience.ask({peer}, {}, " at " + text_of(to));
      }
    }
    if (!error)
      return socket;
    patience.ask({peer}, {}, " at " + text_of(to) + " (" + strerror(error) + ")");
    std::this_thread::sleep_for(std::chrono::milliseconds(kCheckMs));
  }
}

ptrdiff_t send_some(const Socket &to, const void *data, size_t bytes) {
  ssize_t sent = send(to.file(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  to.sent += sent > 0 ? sent : 0;
  return sent >= 0 ? sent : errno == EAGAIN || errno == EINTR ? 0 : -1;
}

ptrdiff_t receive_some(const Socket &from, void *data, size_t bytes) {
  ssize_t got = recv(from.file(), data, bytes, MSG_DONTWAIT);
  from.received += got > 0 ? got : 0;
  if (got > 0)
    return got;
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

bool has_ended(const Socket &socket) {
  char byte;
  ssize_t got = recv(socket.file(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

template <class Step>
static void transfer(const Socket &socket, short events, size_t bytes, uint32_t peer,
                     const Patience &patience, Step step) {
  for (size_t done = 0; done < bytes;) {
    ptrdiff_t part = step(done);
    if (part < 0)
      patience.is_dead(peer, kClosed);
    done += part;
    if (part == 0) {
      wait_for(socket, events);
      patience.ask({peer});
    }
  }
}

void send_all(const Socket &to, const void *data, size_t bytes, uint32_t peer,
              const Patience &patience) {
  transfer(to, POLLOUT, bytes, peer, patience, [&](size_t done) {
    return send_some(to, static_cast<const char *>(data) + done, bytes - done);
  });
}

void receive_all(const Socket &from, void *data, size_t bytes, uint32_t peer,
                 const Patience &patience) {
  transfer(from, POLLIN, bytes, peer, patience, [&](size_t done) {
    return receive_some(from, static_cast<char *>(data) + done, bytes - done);
  });
}

}  // namespace emu::hccl
