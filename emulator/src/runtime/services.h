// What the emulated HCCL asks of the runtime.
#pragma once

#include "emulator.h"

namespace emu {

// A communication domain of so many ranks on the current device: it holds stream ids while it
// exists.
EMU_SHARED aclError open_domain(uint32_t ranks, int *device);
EMU_SHARED void close_domain(uint32_t ranks, int device);

// A collective of `domain` is about to be launched: a captured graph takes stream ids for each
// domain that it touches.
EMU_SHARED aclError use_domain(aclrtStream stream, const void *domain, uint32_t ranks);

// The id of the graph that the stream is being captured into; 0 if it is not.
EMU_SHARED uint32_t graph_of_capture(aclrtStream stream);

// A collective has run on a device: eagerly, in a replay, or inside the kernel of an operator.
// `bytes` have come from other ranks.
EMU_SHARED void count_collective(int device, size_t bytes);
// A communicator was destroyed that tasks or graphs still used.
EMU_SHARED void count_careless_destroy(int device);
// They came over sockets from ranks of other hosts, as often as they travelled.
EMU_SHARED void count_socket_bytes(int device, size_t bytes);

// With modelled time: when the task of the calling worker was reached, and what it takes; and that
// the latest of its ranks came at `latest_ns`, and the longest takes `cost_ns` from there. Repeating
// the meeting changes nothing.
EMU_SHARED int64_t arrival_ns();
EMU_SHARED int64_t kernel_ns();
EMU_SHARED void meet_ranks(int64_t latest_ns, int64_t cost_ns);

// Fault injection compares fault_rank with this; the first communicator tells it.
EMU_SHARED void set_fault_identity(int rank);

// More ranks than cores: waiting threads sleep at once instead of spinning first.
EMU_SHARED void set_oversubscribed();
EMU_SHARED bool oversubscribed();

// How often the work of the calling worker's device was aborted.
EMU_SHARED uint32_t num_aborts();

// True once the device of the calling worker has failed: waits give up.
EMU_SHARED bool device_failed();

}  // namespace emu
