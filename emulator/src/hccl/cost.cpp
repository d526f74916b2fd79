#include "hccl/cost.h"

#include "rates.h"

#include <algorithm>
#include <cmath>

namespace emu::hccl {

static double fixed_us() {
  switch (settings().hccl_expansion) {
  case HcclExpansion::Aiv:
    return rates().collective_aiv_us;
  case HcclExpansion::Ffts:
    return rates().collective_ffts_us;
  default:
    return rates().collective_aicpu_us;
  }
}

namespace {

// Returns the time of one exchange. In the exchange, each rank sends `bytes` bytes to every other
// rank, or receives this number of bytes from every other rank. `ranks` is the number of ranks.
double exchange_ns(double bytes, double ranks, double link_us, double pair_gb_s, double port_gb_s) {
  if (ranks <= 1)
    return 0;
  double gb_s = std::min(port_gb_s, (ranks - 1) * pair_gb_s) * rates().link_efficiency;
  return link_us * 1e3 + (ranks - 1) * bytes / gb_s;
}
double in_node_ns(double bytes, double ranks) {
  return exchange_ns(bytes, ranks, rates().link_us, rates().pair_gb_s, rates().port_gb_s);
}
double between_nodes_ns(double bytes, double nodes) {
  double gb_s = rates().network_gb_s;
  return exchange_ns(bytes, nodes, rates().network_us, gb_s, gb_s);
}

// Returns the time until all ranks have the data of every rank. Each rank gets data first from the
// ranks at the same position on other nodes, and then from the other ranks of its own node.
double gather_ns(double bytes, double nodes, double here) {
  return between_nodes_ns(bytes, nodes) + in_node_ns(bytes * nodes, here);
}

}  // namespace

int64_t operation_ns(Pattern pattern, size_t bytes, uint32_t ranks, uint32_t ranks_of_node) {
  if (ranks <= 1)
    return 0;
  double here = std::max(1u, std::min(ranks, ranks_of_node));
  double nodes = std::ceil(ranks / here), all = ranks;
  double ns = fixed_us() * 1e3;
  switch (pattern) {
  case Pattern::AllGather:
  case Pattern::ReduceScatter:  // takes as long as an all-gather
    ns += gather_ns(bytes, nodes, here);
    break;
  case Pattern::AllReduce:  // a reduce-scatter, and an all-gather
  case Pattern::Broadcast:  // a scatter, and an all-gather
    ns += 2 * gather_ns(bytes / all, nodes, here);
    break;
  case Pattern::AllToAll:
    ns += between_nodes_ns(bytes * here, nodes) + in_node_ns(bytes * nodes, here);
    break;
  case Pattern::Pair:
    ns += nodes > 1 ? between_nodes_ns(bytes, 2) : in_node_ns(bytes, 2);
    break;
  }
  return static_cast<int64_t>(ns + 0.5);
}

int64_t operation_ns(Pattern pattern, size_t bytes, const Communicator &c) {
  auto node = static_cast<uint32_t>(rates().node_ranks);
  return operation_ns(pattern, bytes, c.ranks, std::min(node, c.ranks_here()));
}

}  // namespace emu::hccl
