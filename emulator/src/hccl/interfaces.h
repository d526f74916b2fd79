// The address and the ports of this host that HCCL's variables select.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emu::hccl {

// Throws an error if no address fits. The error names the variable, its value and the remedy.
std::string host_ip();
// Returns the ports in the order in which they are tried. For port 0, the system chooses a port.
std::vector<uint16_t> host_ports();

}  // namespace emu::hccl
