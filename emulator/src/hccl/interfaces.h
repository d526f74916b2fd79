// The address and the ports of this host that HCCL's variables select.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emu::hccl {

// Throws a sentence with variable, value and remedy.
std::string host_ip();
// In the order of attempts; 0 leaves the choice to the system.
std::vector<uint16_t> host_ports();

}  // namespace emu::hccl
