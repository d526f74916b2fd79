// Lets in who knows the secret. Everybody may connect to a port; nobody is waited for: whoever does
// not say the secret at once is shut out, the sooner the more stand there.
#pragma once

#include "hccl/meeting.h"

#include <functional>
#include <list>

namespace emu::hccl {

// Where a rank is. It listens if `address` has a port.
struct Place {
  char memory[128];
  Address address;
};

// The first words on a connection.
struct Hello {
  Secret question;
  uint32_t is_joining;  // the root's roster; else this is one channel of a pair
  uint32_t rank, ranks;
  Channel channel;
  Place place;
};

class Door {
public:
  using Admit = std::function<void(const Hello &, Socket)>;

  Door(Socket listener, const Secret &question)
      : listener_(std::move(listener)), question_(question) {}
  // Waits for at most so long, and lets in who has proved itself.
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
  bool listen_to(Visitor &visitor, bool *has_proved) const;  // false: it has to go
};

bool equal_in_constant_time(const Secret &a, const Secret &b);

}  // namespace emu::hccl
