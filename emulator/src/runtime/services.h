// The interface of the runtime for the emulated HCCL.
#pragma once

#include "emulator.h"

namespace emu {

// Opens a communication domain of `ranks` ranks on the current device. The domain holds stream ids
// until it is closed.
EMU_SHARED aclError open_domain(uint32_t ranks, int *device);
EMU_SHARED void close_domain(uint32_t ranks, int device);

// Call this before a collective of `domain` is launched: a captured graph takes stream ids for each
// domain that it uses.
EMU_SHARED aclError use_domain(aclrtStream stream, const void *domain);

// The id of the graph into which the stream is being captured; 0 if the stream is not being
// captured.
EMU_SHARED uint32_t graph_of_capture(aclrtStream stream);

// Counts an executed collective of a device: eager, in a replay, or inside the kernel of an
// operator. `bytes` came from other ranks.
EMU_SHARED void count_collective(int device, size_t bytes);
// Counts a destroyed communicator that tasks or graphs still used.
EMU_SHARED void count_careless_destroy(int device);
// Counts bytes received over sockets from ranks of other hosts; bytes that travel twice count
// twice.
EMU_SHARED void count_socket_bytes(int device, size_t bytes);

// With modelled time. The first two functions return the time at which the calling worker reached
// its task, and the task's cost. The third one reports that the latest rank arrived at `latest_ns`,
// and that the largest cost after this time is `cost_ns`. Repeating the exchange changes nothing.
EMU_SHARED int64_t arrival_ns();
EMU_SHARED int64_t kernel_ns();
EMU_SHARED void meet_ranks(int64_t latest_ns, int64_t cost_ns);

// Sets the rank with which fault injection compares fault_rank. The first communicator calls this.
EMU_SHARED void set_fault_identity(int rank);

// Called if there are more ranks than cores: waiting threads then sleep at once instead of spinning
// first.
EMU_SHARED void set_oversubscribed();
EMU_SHARED bool oversubscribed();

// Number of aborts of the calling worker's device.
EMU_SHARED uint32_t num_aborts();

// True once the device of the calling worker has failed; waits then end.
EMU_SHARED bool device_failed();

}  // namespace emu
