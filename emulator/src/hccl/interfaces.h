// The address and the ports of this host that HCCL's variables select.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emu::hccl {

// Throws an error that names the variable, its value and the remedy.
std::string host_ip();
// The ports in the order in which they are tried; with 0 the system chooses the port.
std::vector<uint16_t> host_ports();

}  // namespace emu::hccl
