// The interface of the runtime for the emulated HCCL.
#pragma once

#include "emulator.h"

namespace emu {

// A communication domain of so many ranks on the current device: it holds stream ids for its whole
// life.
EMU_SHARED aclError open_domain(uint32_t ranks, int *device);
EMU_SHARED void close_domain(uint32_t ranks, int device);

// Before a collective of `domain` is launched: a captured graph takes stream ids for each domain
// that it uses.
EMU_SHARED aclError use_domain(aclrtStream stream, const void *domain);

// The id of the graph that the stream is being captured into; 0 if it is not.
EMU_SHARED uint32_t graph_of_capture(aclrtStream stream);

// Counts an executed collective of a device: eager, in a replay, or inside the kernel of an
// operator. `bytes` came from other ranks.
EMU_SHARED void count_collective(int device, size_t bytes);
// Counts a destroyed communicator that tasks or graphs still used.
EMU_SHARED void count_careless_destroy(int device);
// Counts bytes over sockets from ranks of other hosts, each time they travelled.
EMU_SHARED void count_socket_bytes(int device, size_t bytes);

// With modelled time: the time at which the calling worker's task was reached, and its cost; and
// that the latest of its ranks arrived at `latest_ns`, with the largest cost `cost_ns` from there.
// Repeating the exchange changes nothing.
EMU_SHARED int64_t arrival_ns();
EMU_SHARED int64_t kernel_ns();
EMU_SHARED void meet_ranks(int64_t latest_ns, int64_t cost_ns);

// Fault injection compares fault_rank with this; the first communicator sets it.
EMU_SHARED void set_fault_identity(int rank);

// More ranks than cores: waiting threads sleep at once instead of spinning first.
EMU_SHARED void set_oversubscribed();
EMU_SHARED bool oversubscribed();

// Number of aborts of the calling worker's device.
EMU_SHARED uint32_t num_aborts();

// True once the device of the calling worker has failed: waits give up.
EMU_SHARED bool device_failed();

}  // namespace emu
