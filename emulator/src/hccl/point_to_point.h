// Messages between pairs of ranks, and the launch of HCCL's calls.
#pragma once

#include "hccl/handles.h"

#include <vector>

namespace emu::hccl {

using Comm = std::shared_ptr<Communicator>;

inline char *bytes_at(const void *p) {
  return static_cast<char *>(const_cast<void *>(accessible(p)));
}

// Launches `body` as one task of the stream. `bytes` is the number of bytes that this rank gets
// from other ranks; each byte counts once. With modelled time, the task takes `ns`.
HcclResult launch_on(const Comm &c, const char *name, aclrtStream stream, size_t bytes, int64_t ns,
                     Task body);

struct Transfer {
  uint32_t peer;
  char *at;
  size_t bytes;
};
// The sends and receives of one rank that run at the same time. Messages between two ranks are sent
// in the order of the lists.
struct Transfers {
  std::vector<Transfer> sends, receives;
};
void exchange(Communicator &c, const Transfers &mine);
// Returns the modelled time of an exchange. The time depends on the number of bytes that this rank
// sends, or on the number that it receives, whichever is larger. These bytes are assumed to be
// spread evenly over all other ranks.
int64_t exchange_ns(const Communicator &c, const Transfers &mine);
size_t bytes_from_others(const Communicator &c, const Transfers &mine);

}  // namespace emu::hccl
