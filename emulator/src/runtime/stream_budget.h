// Counts the stream ids of a device, by the kind of object that uses them.
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

// Returns the number of ids that a communication domain uses.
long streams_per_domain(uint32_t ranks);
// Returns the number of ids that a captured graph needs for each domain that it uses.
long streams_per_graph();

}  // namespace emu
