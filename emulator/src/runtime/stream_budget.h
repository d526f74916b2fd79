// Stream ids of a device: who holds how many.
#pragma once

#include <array>
#include <mutex>
#include <string>

namespace emu {

class StreamBudget {
public:
  enum Holder {
    Streams,       // created by the program
    Captured,      // lanes of captured graphs
    Cascaded,      // more of a lane whose queue entries do not fit one
    Domains,       // communication domains themselves
    GraphDomains,  // captured graphs, for the domains that they touch
    kHolders
  };
  using Held = std::array<long, kHolders>;
  static StreamBudget &of(int device);

  bool take(Holder holder, long count);  // false, and takes nothing, if they are not there
  void release(Holder holder, long count);
  Held held();
  long available();
  std::string shortage();  // what holds them, for messages

private:
  std::mutex mutex_;
  Held held_{};
};

// Ids that a communication domain holds, and that a captured graph takes when it touches it.
long streams_per_domain(uint32_t ranks);

}  // namespace emu
