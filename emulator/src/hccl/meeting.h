// How the ranks of a communicator find each other, and connect where they share no memory.
//
// The root info, which the program carries to all ranks, says where the root listens, what its
// host's memory is called, and two secrets: a peer that connects speaks the first at once, who
// listens answers with the second. Ranks that share the root's memory enter a lobby in it; the
// others join over TCP. When all have come, the root tells everybody who is where and listens no
// more. Then each pair of ranks of different hosts connects, and all other sockets are closed.
#pragma once

#include "hccl/sockets.h"

#include <third_party/hccl/inc/hccl/hccl.h>

#include <array>
#include <string>
#include <vector>

namespace emu::hccl {

using Secret = std::array<unsigned char, 32>;

// The opaque bytes of an HcclRootInfo.
struct RootInfo {
  uint64_t mark;     // of this format
  char name[128];    // of the communicator
  char memory[128];  // names of the root's shared memory begin so
  Address address;
  Secret question, answer;
};
static_assert(sizeof(RootInfo) <= sizeof(HcclRootInfo));

// Of what a pair of ranks exchanges, each has a connection of its own.
enum class Channel : uint32_t { Collectives, Messages, Notes, Lives };
constexpr size_t kChannels = 4;

struct RemoteRank {
  uint32_t rank;
  std::array<Socket, kChannels> sockets;
  const Socket &operator[](Channel c) const { return sockets[static_cast<size_t>(c)]; }
};

struct Company {
  std::string memory;  // names of this host's shared memory begin so
  std::vector<uint32_t> here;
  std::vector<RemoteRank> elsewhere;
};

// Makes the calling process the root: it listens from now on, until all have met.
RootInfo new_root();
// Blocks until all ranks are there. Throws what is wrong.
Company meet(const RootInfo &root, uint32_t ranks, uint32_t rank);
// To be called when all ranks of this host have mapped what they share.
void forget(const RootInfo &root);

}  // namespace emu::hccl
