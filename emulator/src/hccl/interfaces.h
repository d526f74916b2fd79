// Which address and which ports of this host HCCL's variables name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emu::hccl {

// Throws a sentence with variable, value and remedy.
std::string host_ip();
// In the order in which they are to be tried; 0 leaves the choice to the system.
std::vector<uint16_t> host_ports();

}  // namespace emu::hccl
