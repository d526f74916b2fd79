"""The findings about the network between nodes, for HCCL and for other libraries."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from dist_aclgraph.config.ports import MAX_PORT
from dist_aclgraph.environment import CONFIGURED_HCCL

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
PORT_VARIABLES = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")


def network_problem(variables: dict[str, str], interfaces: list[str]) -> str:
    """Return the mistake in this machine's network variables; "" if there is no mistake.

    Args:
        variables: variables of HCCL and Gloo; see ``environment.network_variables``.
        interfaces: names of this machine's network interfaces.
    """
    address = variables.get("HCCL_IF_IP", "")
    if address and not _is_ours(address):
        return f"HCCL_IF_IP is {address}, which is no address of this machine"
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = variables.get(name, "")
        if asked and not _match(asked, interfaces):
            return f"{name} is {asked}, which none of {', '.join(interfaces)} matches"
    for name in PORT_VARIABLES:
        asked = variables.get(name, "")
        try:
            _port_ranges(asked)
        except ValueError:
            return (
                f"{name} is {asked}, but must be auto or ports from 1 to {MAX_PORT}: FIRST-LAST, "
                "several of them with commas between, e.g. 60000-60050"
            )
    return ""


def port_warning(variables: dict[str, str]) -> str:
    """Return the reason why another program might occupy HCCL's ports; "" if no other program can
    occupy them.
    """
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
        reserved = _port_ranges(RESERVED.read_text().strip())
    except (OSError, ValueError):
        return ""
    for name in PORT_VARIABLES:
        try:
            asked = _port_ranges(variables.get(name, ""))
        except ValueError:  # ``network_problem`` reports this error
            continue
        for port in sorted(port for ports in asked for port in ports):
            if first <= port <= last and not any(port in ports for ports in reserved):
                return (
                    f"{name} has ports of the kernel's own range ({first}-{last}), such as {port}, "
                    "which other programs may be given first"
                )
    return ""


def overridden_warning(variables: dict[str, str]) -> str:
    """Return a warning that lists the environment variables whose values the configuration
    overrides; "" if the configuration overrides no variable.
    """
    overridden = [
        f"{name}={variables[name]} ({key})"
        for name, key in sorted(CONFIGURED_HCCL.items())
        if name in variables
    ]
    if not overridden:
        return ""
    return (
        f"{', '.join(overridden)} of this environment reach no worker: the configuration goes "
        "first, as plans count with it"
    )


def _is_ours(address: str) -> bool:
    try:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


def _match(asked: str, interfaces: list[str]) -> bool:
    """Return whether a list such as ``eth,enp``, ``=eth0`` or ``^docker`` matches any interface."""
    names = asked.lstrip("^=").split(",")
    if asked.startswith("^="):
        return any(each not in names for each in interfaces)
    if asked.startswith("^"):
        return any(not each.startswith(tuple(names)) for each in interfaces)
    if asked.startswith("="):
        return any(each in names for each in interfaces)
    return any(each.startswith(tuple(names)) for each in interfaces)


def _port_ranges(ports: str) -> list[range]:
    """Return the ranges in a text such as ``60000-60010,60020``; an empty list for ``auto`` and "".

    Raises:
        ValueError: the text is malformed, a range is empty, or a number is not a valid port.
    """
    if ports in ("", "auto"):
        return []
    found = []
    for part in ports.split(","):
        first, dash, last = part.partition("-")
        ends = int(first), int(last if dash else first)
        if not 1 <= ends[0] <= ends[1] <= MAX_PORT:
            raise ValueError(f"{part} is no range of ports")
        found.append(range(ends[0], ends[1] + 1))
    return found
