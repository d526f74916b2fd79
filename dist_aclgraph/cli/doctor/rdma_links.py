"""Checks the RDMA links of this host's NPUs with the driver's hccn_tool.

A group whose ranks are on several nodes uses these links. This module was not tried with a real
hccn_tool. The format of the tool's output is known from users of Ascend clusters: ``link status:
UP`` for ``-link -g``, and a line with the number of received packets for ``-ping -g``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dist_aclgraph.cli.doctor.finding import Finding

TOOL = Path("/usr/local/Ascend/driver/tools/hccn_tool")
ANSWER_S = 20.0  # time limit of one call of the tool


def find_tool(tool: Path = TOOL) -> str | None:
    """Return the path of hccn_tool; None if this host or container does not have it."""
    return shutil.which("hccn_tool") or (str(tool) if tool.is_file() else None)


def link_finding(npus: Sequence[str], tool: str | None) -> Finding:
    """Return the finding about the RDMA links of this host's NPUs."""
    name = "RDMA links"
    if tool is None:
        remedy = f"mount {TOOL.parent} into the container; only groups over several nodes need it"
        return Finding(name, True, "there is no hccn_tool to ask", remedy, is_warning=True)
    with ThreadPoolExecutor(len(npus) or 1) as pool:
        states = dict(zip(npus, pool.map(lambda npu: _link(npu, tool), npus), strict=True))
    wrong = [f"{npu} {state}" for npu, state in states.items() if state != "UP"]
    if not wrong:
        return Finding(name, True, f"{len(npus)} are UP")
    remedy = (
        "only groups over several nodes need them: look at cable and switch, and at "
        "hccn_tool -i N -net_health -g"
    )
    return Finding(name, True, ", ".join(wrong), remedy, is_warning=True)


def ping_failures(addresses: Sequence[str]) -> dict[str, str]:
    """Ping RDMA addresses of other nodes from this node's first NPU.

    Returns:
        For each address that does not answer, the reason. Empty if this node has no hccn_tool.
    """
    tool = find_tool()
    if tool is None:
        return {}
    return {address: reason for address in addresses if (reason := _ping(address, tool))}


def _link(npu: str, tool: str) -> str:
    output = _run(tool, "-i", npu.removeprefix("davinci"), "-link", "-g")
    found = re.search(r"link status:\s*(\w+)", output, re.IGNORECASE)
    return found[1].upper() if found else _last_line(output)


def _ping(address: str, tool: str) -> str:
    """Return the reason why an address does not answer; "" if it answers."""
    output = _run(tool, "-i", "0", "-ping", "-g", "address", address)
    found = re.search(r"(\d+)\s+(?:packets\s+)?received", output)
    if found is None:
        return _last_line(output)
    return "" if int(found[1]) else "no packet came back"


def _run(*command: str) -> str:
    """Return a command's output, or the reason why there is no output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_S:.0f} s"
    except OSError as e:
        return f"cannot be run: {e.strerror}"
    return done.stdout + done.stderr


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]
