#include "adxl/peer.h"

#include "adxl/streams.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace emu::adxl {

constexpr char kMagic[8] = "emuadxl";
constexpr size_t kMaxClients = 512;  // the document of Connect
constexpr auto kGreetingLimit = std::chrono::seconds(5);

File::~File() {
  if (file_ >= 0)
    close(file_);
}

EngineName parse_name(const std::string &text) {
  EngineName name{text, text};
  refuse_unless(text.size() < sizeof Identity::engine, PARAM_INVALID, "the engine name ", text,
                " is longer than ", sizeof Identity::engine - 1, " characters");
  size_t after = text.find(':');
  if (!text.empty() && text[0] == '[') {
    size_t end = text.find(']');
    refuse_unless(end != std::string::npos, PARAM_INVALID, "the engine name ", text, " lacks ]");
    name.ip = text.substr(1, end - 1);
    after = text.find(':', end);
  } else if (after != std::string::npos) {
    name.ip = text.substr(0, after);
  }
  in6_addr address;
  bool is_ip = inet_pton(AF_INET, name.ip.c_str(), &address) == 1 ||
               inet_pton(AF_INET6, name.ip.c_str(), &address) == 1;
  refuse_unless(is_ip, PARAM_INVALID, "the engine name ", text, " has no IP address");
  refuse_unless(name.ip != "0.0.0.0" && name.ip != "::", PARAM_INVALID, "the engine name ", text,
                " is a wildcard, but names are unique");
  if (after != std::string::npos) {
    const char *end = text.data() + text.size();
    auto [stop, error] = std::from_chars(text.data() + after + 1, end, name.port);
    refuse_unless(error == std::errc() && stop == end, PARAM_INVALID, "the engine name ", text,
                  " has an invalid port");
  }
  return name;
}

// ---- sockets

namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = sizeof(sockaddr_in);

  explicit SocketAddress(const EngineName &name) {
    auto *four = reinterpret_cast<sockaddr_in *>(&storage);
    auto *six = reinterpret_cast<sockaddr_in6 *>(&storage);
    four->sin_family = AF_INET;
    four->sin_port = htons(name.port);
    if (inet_pton(AF_INET, name.ip.c_str(), &four->sin_addr) == 1)
      return;
    six->sin6_family = AF_INET6;
    inet_pton(AF_INET6, name.ip.c_str(), &six->sin6_addr);
    bytes = sizeof *six;
  }
  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&storage); }
  File socket() const {
    int file = ::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    refuse_unless(file >= 0, FAILED, "socket: ", strerror(errno));
    int yes = 1;
    setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return File(file);
  }
};

int ms_until(Clock::time_point end) {
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return int(std::max<int64_t>(0, left)) + 1;
}

enum class Step { Done, Late, Closed };

Step wait_for(int file, short events, Clock::time_point end) {
  while (Clock::now() < end) {
    pollfd one{file, events, 0};
    if (poll(&one, 1, ms_until(end)) > 0)
      return Step::Done;
  }
  return Step::Late;
}

template <class Call>
Step transfer(int file, short events, size_t bytes, Clock::time_point end, Call call) {
  for (size_t done = 0; done < bytes;) {
    ssize_t part = call(done);
    if (part == 0 || (part < 0 && errno != EAGAIN && errno != EINTR))
      return Step::Closed;
    if (part > 0)
      done += part;
    else if (wait_for(file, events, end) == Step::Late)
      return Step::Late;
  }
  return Step::Done;
}

Step send_all(int file, const void *data, size_t bytes, Clock::time_point end) {
  return transfer(file, POLLOUT, bytes, end, [&](size_t done) {
    return send(file, static_cast<const char *>(data) + done, bytes - done, MSG_NOSIGNAL);
  });
}

Step receive_all(int file, void *data, size_t bytes, Clock::time_point end) {
  return transfer(file, POLLIN, bytes, end, [&](size_t done) {
    return recv(file, static_cast<char *>(data) + done, bytes - done, 0);
  });
}

bool is_greeting(const Identity &told) {
  return !memcmp(told.magic, kMagic, sizeof kMagic) && told.num_ranges <= kMaxRanges &&
         memchr(told.engine, 0, sizeof told.engine) && memchr(told.host, 0, sizeof told.host);
}

}  // namespace

// ---- a client's view

Self::Self(const EngineName &name, int physical_device) {
  static_assert(sizeof Identity::host > 32);  // the setting's limit
  memcpy(identity_.magic, kMagic, sizeof kMagic);
  snprintf(identity_.engine, sizeof identity_.engine, "%s", name.text.c_str());
  snprintf(identity_.host, sizeof identity_.host, "%s", settings().host.c_str());
  const char *roce = getenv("HCCL_INTRA_ROCE_ENABLE");
  identity_.roce = roce && !strcmp(roce, "1");
  identity_.pid = getpid();
  identity_.device = physical_device;
  std::random_device random;
  for (uint8_t &byte : identity_.secret)
    byte = uint8_t(random());
  identity_.secret_address = reinterpret_cast<uintptr_t>(&identity_.secret);
}

Peer::Peer(const EngineName &name, const Identity &self, const std::vector<Range> &local,
           int timeout_ms) {
  auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  auto check = [&](Step step, const char *what) {
    refuse_unless(step != Step::Late, TIMEOUT, name.text, " did not ", what, " within ", timeout_ms,
                  " ms");
    refuse_unless(step != Step::Closed, FAILED, name.text, " closed the connection");
  };
  SocketAddress address(name);
  socket_ = address.socket();
  int error = connect(socket_.get(), address.get(), address.bytes) ? errno : 0;
  if (error == EINPROGRESS) {
    check(wait_for(socket_.get(), POLLOUT, end), "accept the connection");
    socklen_t bytes = sizeof error;
    getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  refuse_unless(!error, FAILED, "no connection to ", name.text, ": ", strerror(error));
  check(send_all(socket_.get(), &self, sizeof self, end), "answer");
  check(receive_all(socket_.get(), &identity_, sizeof identity_, end), "answer");
  refuse_unless(is_greeting(identity_), FAILED, name.text, " is no emulated engine");
  ranges_.resize(identity_.num_ranges);
  check(receive_all(socket_.get(), ranges_.data(), ranges_.size() * sizeof(Range), end), "answer");
  hccs_ = !strcmp(self.host, identity_.host) && !self.roce && !identity_.roce;
  try {
    check_peer(name, self, local);
  } catch (const Refusal &) {
    leave(ms_until(end));  // the server must not count a link that its client has refused
    throw;
  }
}

void Peer::check_peer(const EngineName &name, const Identity &self,
                      const std::vector<Range> &local) const {
  refuse_unless(identity_.engine == name.text, PARAM_INVALID, "the engine at ", name.text,
                " has the name ", identity_.engine);
  check_devices(self, local);
  refuse_unless(is_alive(), FAILED, name.text,
                " is a process whose memory this process may not access; emulated links reach only"
                " processes of the same user, machine and PID namespace");
}

void Peer::check_devices(const Identity &self, const std::vector<Range> &local) const {
  bool same = !strcmp(self.host, identity_.host) && self.device == identity_.device;
  refuse_unless(!same, PARAM_INVALID, identity_.engine, " has the same device ", self.device,
                ", and no device is linked to itself");
  if (!hccs_)
    return;
  for (const std::vector<Range> *ranges : {&local, &ranges_})
    for (const Range &range : *ranges)
      demand(range.type != MEM_DEVICE || range.begin % kHccsAlignment == 0, FAILED,
             "the registered memory at ", hex(range.begin), " of ",
             ranges == &local ? self.engine : identity_.engine,
             " does not begin at a multiple of 2 MiB, which HCCS demands of device memory");
}

bool Peer::is_alive() const {
  uint8_t found[sizeof identity_.secret];
  iovec here{found, sizeof found};
  iovec there{reinterpret_cast<void *>(identity_.secret_address), sizeof found};
  return process_vm_readv(identity_.pid, &here, 1, &there, 1, 0) == ssize_t(sizeof found) &&
         !memcmp(found, identity_.secret, sizeof found);
}

int Peer::copy(TransferOp operation, uint64_t local, uint64_t remote, size_t bytes) const {
  iovec here{accessible(reinterpret_cast<char *>(local)), bytes};
  iovec there{accessible(reinterpret_cast<char *>(remote)), bytes};
  auto call = operation == READ ? process_vm_readv : process_vm_writev;
  while (here.iov_len) {
    ssize_t moved = call(identity_.pid, &here, 1, &there, 1, 0);
    if (moved <= 0)
      return moved ? errno : EFAULT;
    for (iovec *part : {&here, &there}) {
      part->iov_base = static_cast<char *>(part->iov_base) + moved;
      part->iov_len -= moved;
    }
  }
  return 0;
}

Status Peer::leave(int timeout_ms) const {
  auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  shutdown(socket_.get(), SHUT_WR);
  char byte;
  // If the peer has died, the link has also ended, so the status is SUCCESS.
  return receive_all(socket_.get(), &byte, 1, end) == Step::Late ? TIMEOUT : SUCCESS;
}

// ---- a server

Listener::Listener(const EngineName &name, const Identity &self, const Memory &memory,
                   aclrtContext context)
    : self_(self), memory_(memory), context_(context) {
  SocketAddress address(name);
  socket_ = address.socket();
  int yes = 1;
  setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  bool listens = !bind(socket_.get(), address.get(), address.bytes) &&
                 !listen(socket_.get(), SOMAXCONN);
  refuse_unless(listens, FAILED, "cannot listen at ", name.text, ": ", strerror(errno));
  wake_ = File(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  // By default, Linux (Yama) lets only a parent access this process's memory. This call allows the
  // access to all processes of the user.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  thread_ = std::thread([this] { serve(); });
}

Listener::~Listener() {
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

namespace {

// A client's connection. It becomes a link when the server has reserved stream ids for it.
struct Connection {
  File socket;
  Clock::time_point begun = Clock::now();
  Identity told{};
  size_t received = 0;
  std::unique_ptr<Domain> domain;
  bool is_link() const { return domain != nullptr; }

  bool begin_link() {
    try {
      domain = std::make_unique<Domain>();
    } catch (const Refusal &refusal) {
      fprintf(stderr, "[emulator] a link is refused: %s\n", refusal.what());
    }
    return is_link();
  }

  // Returns false if the connection has ended, or if the peer has sent something else than a
  // client's greeting.
  bool read() {
    char *to = is_link() ? nullptr : reinterpret_cast<char *>(&told) + received;
    char nothing;
    size_t room = is_link() ? 1 : sizeof told - received;
    ssize_t got = recv(socket.get(), is_link() ? &nothing : to, room, 0);
    if (got <= 0)
      return got < 0 && (errno == EAGAIN || errno == EINTR);
    received += is_link() ? 0 : got;
    return !is_link() && (received < sizeof told || is_greeting(told));
  }
  bool is_late() const { return !is_link() && Clock::now() > begun + kGreetingLimit; }
};

bool answer(const Connection &client, Identity self, const std::vector<Range> &ranges) {
  self.num_ranges = uint32_t(ranges.size());
  auto end = Clock::now() + kGreetingLimit;
  int file = client.socket.get();
  return send_all(file, &self, sizeof self, end) == Step::Done &&
         send_all(file, ranges.data(), ranges.size() * sizeof(Range), end) == Step::Done;
}

}  // namespace

void Listener::serve() {
  pthread_setname_np(pthread_self(), "npu_adxl");
  aclrtSetCurrentContext(context_);
  std::list<Connection> clients;
  for (;;) {
    std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
    if (clients.size() >= kMaxClients)
      polled[1].fd = -1;
    for (const Connection &client : clients)
      polled.push_back({client.socket.get(), POLLIN, 0});
    poll(polled.data(), polled.size(), 1000);
    if (polled[0].revents)
      return;
    size_t i = 2;
    for (auto client = clients.begin(); client != clients.end(); i++) {
      bool goes_on = !polled[i].revents || client->read();
      if (goes_on && !client->is_link() && client->received == sizeof client->told) {
        num_clients_++;  // before the client knows that it is linked
        goes_on = client->begin_link() && answer(*client, self_, memory_.ranges());
        num_clients_ -= !client->is_link();
      }
      if (!goes_on || client->is_late()) {
        num_clients_ -= client->is_link();
        client->domain.reset();  // before the client knows that the link has ended
        client = clients.erase(client);
      } else {
        ++client;
      }
    }
    if (polled[1].revents)
      if (int file = accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
          file >= 0)
        clients.emplace_back().socket = File(file);
  }
}

}  // namespace emu::adxl
