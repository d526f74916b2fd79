// Stream ids of a device, by holder.
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
    Cascaded,      // further ids of a lane whose entries do not fit into one queue
    Domains,       // communication domains themselves
    GraphDomains,  // captured graphs, for the domains that they use
    kHolders
  };
  using Held = std::array<long, kHolders>;
  static StreamBudget &of(int device);

  bool take(Holder holder, long count);  // takes nothing and returns false if too few are free
  void release(Holder holder, long count);
  Held held();
  long available();
  std::string shortage();  // text for messages: which holders have how many ids

private:
  std::mutex mutex_;
  Held held_{};
};

// Ids that a communication domain holds.
long streams_per_domain(uint32_t ranks);
// Ids that a captured graph takes for each domain that it uses.
long streams_per_graph();

}  // namespace emu
