// Admits only connections that send the secret. Any process can connect to the port, but no process
// can block the listener: a connection that does not send the secret is closed after a short time,
// and even earlier if other connections are waiting.
#pragma once

#include "hccl/meeting.h"

#include <functional>
#include <list>

namespace emu::hccl {

// The host of a rank, and its address. The rank listens only if `address` has a port.
struct Place {
  char memory[128];
  Address address;
};

// The first bytes that a rank sends on a connection.
struct Hello {
  Secret question;
  uint32_t is_joining;  // joins the root's list of ranks; else a channel of a pair of ranks
  uint32_t rank, ranks;
  Channel channel;
  Place place;
};

class Door {
public:
  using Admit = std::function<void(const Hello &, Socket)>;

  Door(Socket listener, const Secret &question)
      : listener_(std::move(listener)), question_(question) {}
  // Waits for at most `ms` milliseconds. Admits connections that have sent the secret.
  void attend(int ms, const Admit &admit);

private:
  struct Visitor {
    Socket socket;
    std::chrono::steady_clock::time_point since;
    Hello hello;
    size_t heard = 0;
  };
  Socket listener_;
  const Secret question_;
  std::list<Visitor> visitors_;

  void accept_all();
  bool listen_to(Visitor &visitor, bool *has_proved) const;  // false: the connection must be closed
};

bool equal_in_constant_time(const Secret &a, const Secret &b);

}  // namespace emu::hccl
