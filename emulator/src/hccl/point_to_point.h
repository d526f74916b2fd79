// Messages between pairs of ranks, and how a call of HCCL is launched.
#pragma once

#include "hccl/handles.h"

#include <vector>

namespace emu::hccl {

using Comm = std::shared_ptr<Communicator>;

inline char *bytes_at(const void *p) {
  return static_cast<char *>(const_cast<void *>(accessible(p)));
}

// As one task of the stream. `bytes` come from other ranks, counted once each; with modelled time
// the task takes `ns`.
HcclResult launch_on(const Comm &c, const char *name, aclrtStream stream, size_t bytes, int64_t ns,
                     Task body);

struct Transfer {
  uint32_t peer;
  char *at;
  size_t bytes;
};
// The sends and receives of one rank at once; between two ranks in the order of the lists.
struct Transfers {
  std::vector<Transfer> sends, receives;
};
void exchange(Communicator &c, const Transfers &mine);
// As if the larger of its sent and received bytes were spread evenly over all others.
int64_t exchange_ns(const Communicator &c, const Transfers &mine);
size_t bytes_from_others(const Communicator &c, const Transfers &mine);

}  // namespace emu::hccl
