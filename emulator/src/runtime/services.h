// The functions of the runtime that the emulated HCCL uses.
#pragma once

#include "emulator.h"

namespace emu {

// Opens a communication domain on the current device. `ranks` is its number of ranks. The domain
// uses stream ids until it is closed.
EMU_SHARED aclError open_domain(uint32_t ranks, int *device);
EMU_SHARED void close_domain(uint32_t ranks, int device);

// To be called before a collective of `domain` is launched. If the stream is being captured, the
// graph takes stream ids for each domain that it uses.
EMU_SHARED aclError use_domain(aclrtStream stream, const void *domain);

// Returns the id of the graph into which the stream is being captured; 0 if the stream is not being
// captured.
EMU_SHARED uint32_t graph_of_capture(aclrtStream stream);

// Counts a collective that a device has executed: eagerly, in a replay, or inside the kernel of an
// operator. `bytes` is the number of bytes that came from other ranks.
EMU_SHARED void count_collective(int device, size_t bytes);
// Counts a communicator that was destroyed although tasks or graphs still used it.
EMU_SHARED void count_careless_destroy(int device);
// Counts bytes that were received over sockets from ranks on other hosts. Bytes that are sent twice
// count twice.
EMU_SHARED void count_socket_bytes(int device, size_t bytes);

// These functions are for modelled time. arrival_ns returns the time at which the calling worker
// reached its task, and kernel_ns returns the cost of the task. meet_ranks reports when the last
// rank arrived (`latest_ns`), and the largest cost of a rank after this time (`cost_ns`).
// meet_ranks may be called again with the same values.
EMU_SHARED int64_t arrival_ns();
EMU_SHARED int64_t kernel_ns();
EMU_SHARED void meet_ranks(int64_t latest_ns, int64_t cost_ns);

// Sets the rank of this process, which fault injection compares with the setting fault_rank. The
// first communicator calls this.
EMU_SHARED void set_fault_identity(int rank);

// To be called if there are more ranks than cores. After this call, a waiting thread sleeps at
// once, instead of spinning first.
EMU_SHARED void set_oversubscribed();
EMU_SHARED bool oversubscribed();

// Returns how many times the work on the calling worker's device was aborted.
EMU_SHARED uint32_t num_aborts();

// Returns whether the device of the calling worker has failed. If so, waits must end.
EMU_SHARED bool device_failed();

}  // namespace emu
