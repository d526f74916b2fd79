// The time of an operation between ranks, with modelled time (kernels=timed).
#pragma once

#include "hccl/communicator.h"

namespace emu::hccl {

// The ways of bytes. Within a node every pair of ranks has a link. Between nodes, ranks at the same
// position exchange their nodes' data, so the bytes of a node cross the network once.
enum class Pattern { AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Pair };

// In nanoseconds, from the arrival of the latest rank. `bytes` is, for AllGather, the offer of one
// rank; for ReduceScatter, the result of one rank; for AllReduce and Broadcast, the whole; for
// AllToAll and Pair, the data for one rank.
int64_t operation_ns(Pattern pattern, size_t bytes, uint32_t ranks, uint32_t ranks_of_node);
int64_t operation_ns(Pattern pattern, size_t bytes, const Communicator &c);

}  // namespace emu::hccl
