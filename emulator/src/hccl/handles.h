// The object to which an HcclComm points.
#pragma once

#include "hccl/communicator.h"

#include <third_party/hccl/inc/hccl/hccl.h>

#include <memory>

namespace emu::hccl {

struct Handle {
  std::shared_ptr<Communicator> communicator;
};

inline const std::shared_ptr<Communicator> &communicator(HcclComm comm) {
  return static_cast<Handle *>(comm)->communicator;
}

// Stores a communicator of this process, for callers that know only the communicator's name.
void remember(const std::shared_ptr<Communicator> &communicator);
std::shared_ptr<Communicator> find(const std::string &name, uint32_t rank);

}  // namespace emu::hccl
