// The time of an operation between ranks, with modelled time (kernels=timed).
#pragma once

#include "hccl/communicator.h"

namespace emu::hccl {

// The kinds of transfers. Within a node every pair of ranks has a link. Between nodes, ranks at the
// same position exchange their nodes' data, so the bytes of a node cross the network once.
enum class Pattern { AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Pair };

// The duration in nanoseconds after the arrival of the latest rank. The meaning of `bytes`: for
// AllGather the input of one rank; for ReduceScatter the result of one rank; for AllReduce and
// Broadcast all data; for AllToAll and Pair the data for one rank.
int64_t operation_ns(Pattern pattern, size_t bytes, uint32_t ranks, uint32_t ranks_of_node);
int64_t operation_ns(Pattern pattern, size_t bytes, const Communicator &c);

}  // namespace emu::hccl
