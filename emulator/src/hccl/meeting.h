// The rendezvous of a communicator's ranks, and the connections between ranks without shared
// memory. The program passes the root info to all ranks. The root info contains the root's address,
// the name of its host's memory, and two secrets: a peer that connects sends the first secret at
// once, and the listener replies with the second secret. Ranks that share the root's memory meet in
// a lobby in this memory. The other ranks join over TCP. When all ranks have arrived, the root
// sends the list of places to every rank and stops listening. Then each pair of ranks of different
// hosts connects, and all other sockets are closed.
#pragma once

#include "hccl/sockets.h"

#include <third_party/hccl/inc/hccl/hccl.h>

#include <array>
#include <string>
#include <vector>

namespace emu::hccl {

using Secret = std::array<unsigned char, 32>;

// The contents of an HcclRootInfo, which are opaque bytes for the program.
struct RootInfo {
  uint64_t mark;     // marks this format
  char name[128];    // of the communicator
  char memory[128];  // prefix of the names of the root's shared memory
  Address address;
  Secret question, answer;
};
static_assert(sizeof(RootInfo) <= sizeof(HcclRootInfo));

// Each kind of exchange between two ranks has its own connection.
enum class Channel : uint32_t { Collectives, Messages, Notes, Lives };
constexpr size_t kChannels = 4;

struct RemoteRank {
  uint32_t rank;
  std::array<Socket, kChannels> sockets;
  const Socket &operator[](Channel c) const { return sockets[static_cast<size_t>(c)]; }
};

struct Company {
  std::string memory;  // prefix of the names of this host's shared memory
  std::vector<uint32_t> here;
  std::vector<RemoteRank> elsewhere;
};

// Makes the calling process the root. The root listens from this call until all ranks have met.
RootInfo new_root();
// Blocks until all ranks have arrived. If this fails, throws an error with the reason.
Company meet(const RootInfo &root, uint32_t ranks, uint32_t rank);
// To be called when all ranks of this host have mapped their shared memory.
void forget(const RootInfo &root);

}  // namespace emu::hccl
