// The modelled time (kernels=timed) of an operation between ranks.
#pragma once

#include "hccl/communicator.h"

namespace emu::hccl {

// The kinds of operations. Within a node, every pair of ranks has a link. Between nodes, ranks at
// the same position exchange the data of their nodes, so each byte of a node crosses the network
// only once.
enum class Pattern { AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Pair };

// Returns how many nanoseconds the operation takes after the last rank has arrived. `bytes` depends
// on the pattern. AllGather: the size of one rank's input. ReduceScatter: the size of one rank's
// result. AllReduce and Broadcast: the size of all data. AllToAll and Pair: the size of the data
// for one rank.
int64_t operation_ns(Pattern pattern, size_t bytes, uint32_t ranks, uint32_t ranks_of_node);
int64_t operation_ns(Pattern pattern, size_t bytes, const Communicator &c);

}  // namespace emu::hccl
