"""The rates at which the simulation copies KV blocks, in bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dist_aclgraph.errors import ConfigError

HOST_GB_S, DISK_GB_S, NETWORK_GB_S = 5.0, 2.0, 0.75


@dataclass(frozen=True)
class CopyRates:
    """Rates of copies, in bytes per second.

    Attributes:
        host: rate of copies between one NPU and files in memory.
        disk: rate at which all NPUs of a data-parallel rank together read from the disk.
        network: rate at which one node of a group reads from other nodes. ADR 35 explains the
            default.
    """

    host: float = HOST_GB_S * 1e9
    disk: float = DISK_GB_S * 1e9
    network: float = NETWORK_GB_S * 1e9

    @property
    def in_words(self) -> str:
        return (
            f"copies of KV move {self.host / 1e9:g} GB/s between each NPU and memory, and "
            f"{self.disk / 1e9:g} GB/s from the disk for each data parallel rank; files of states "
            "take no room, and writes to the disk take no time; each node of a group fetches "
            f"{self.network / 1e9:g} GB/s from other nodes, one prompt after the other"
        )


def copy_rates(host_gbs: float, disk_gbs: float, network_gbs: float = NETWORK_GB_S) -> CopyRates:
    """Convert rates in GB/s to rates in bytes per second.

    Raises:
        ConfigError: a rate is not positive and finite.
    """
    options = {"--host-gbs": host_gbs, "--disk-gbs": disk_gbs, "--network-gbs": network_gbs}
    for option, rate in options.items():
        if not 0 < rate < math.inf:
            raise ConfigError(f"{option} is {rate:g}; it must be positive and finite")
    return CopyRates(host_gbs * 1e9, disk_gbs * 1e9, network_gbs * 1e9)
