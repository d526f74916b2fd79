// What an operation among ranks takes with modelled time (kernels=timed).
#pragma once

#include "hccl/communicator.h"

namespace emu::hccl {

// How bytes travel. Within a node every pair of ranks has a link; between nodes, ranks of equal place
// exchange what their nodes have, so that a node's bytes cross the network once.
enum class Pattern { AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Pair };

// In nanoseconds, from the arrival of the latest rank. `bytes`: AllGather what one rank offers,
// ReduceScatter what one gets, AllReduce and Broadcast the whole, AllToAll and Pair what goes to one.
int64_t operation_ns(Pattern pattern, size_t bytes, uint32_t ranks, uint32_t ranks_of_node);
int64_t operation_ns(Pattern pattern, size_t bytes, const Communicator &c);

}  // namespace emu::hccl
