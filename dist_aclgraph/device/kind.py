"""Finds which kind of device this machine has, and computes the settings of the emulator.

This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.environment import visible_devices
from dist_aclgraph.errors import DeviceError

DEVICES_OF_A_MACHINE = 8
DEV = Path("/dev")  # the driver creates davinci0, davinci1, ... in this folder

DeviceKind = Literal["npu", "emulated"]


def npus_here() -> list[str]:
    """Return the names of this machine's NPUs, in the order of their ids.

    A name contains the number of the NPU on the host. In a container with only some of the host's
    NPUs, CANN's ids are the positions in this list.
    """
    names = (path.name for path in DEV.glob("davinci[0-9]*"))
    return sorted(names, key=lambda name: int(name.removeprefix("davinci")))


def resolve_kind(kind: Literal["auto", "npu", "emulated"]) -> DeviceKind:
    """Return ``kind``; for ``auto``, return the kind of device that this machine has.

    Raises:
        DeviceError: ``kind`` is ``npu``, and this machine has no NPU.
    """
    if kind == "emulated":
        return "emulated"
    has_npu = bool(npus_here())
    if kind == "npu" and not has_npu:
        raise DeviceError(
            "device.kind is npu, but there is no /dev/davinci* here; check the driver and the "
            "container's devices, or set device.kind=emulated"
        )
    return "npu" if has_npu else "emulated"


def is_emulated_here(kind: Literal["auto", "npu", "emulated"]) -> bool:
    """Return whether ``kind`` selects the emulated NPU on this machine.

    For ``npu`` on a machine without NPUs, this function returns False, whereas ``resolve_kind``
    raises an error.
    """
    return kind != "npu" and resolve_kind(kind) == "emulated"


def emulator_settings(config: DeviceConfig, rank: int) -> dict[str, str | int | bool]:
    """Return the emulator's settings for one world rank."""
    emulated = config.emulator
    # The number of emulated devices is larger than each id that this process may use.
    devices = max(DEVICES_OF_A_MACHINE, 1 + max(visible_devices() or (0,)))
    settings: dict[str, str | int | bool] = {
        "devices": devices,
        "strict": emulated.strict,
        "streams": emulated.streams_by_rank.get(rank, emulated.streams),
        "hbm_mb": emulated.memory_mb_by_rank.get(rank, emulated.memory_mb),
        "kernels": emulated.kernels,
        "choices": emulated.choices,
        "accounting": emulated.accounting,
        "hccl_expansion": config.expansion,
        "soc": config.chip,
        "cann": emulated.cann,
        "wait_s": emulated.wait_s,
        "trace": emulated.trace,
    }
    if emulated.rates is not None:
        settings["rates"] = emulated.rates
    if emulated.rules is not None:
        settings["rules"] = emulated.rules
    for prefix, fault in (("fault", emulated.fault), ("fault2", emulated.second_fault)):
        if fault.op and fault.rank in (None, rank):
            settings |= {
                f"{prefix}_op": fault.op,
                f"{prefix}_when": fault.when,
                f"{prefix}_call": fault.call,
                f"{prefix}_kind": fault.kind,
                f"{prefix}_stall_s": str(fault.stall_s),
                f"{prefix}_operand": fault.operand,
                f"{prefix}_offset": fault.offset,
            }
    if file := emulated.fault.file or emulated.second_fault.file:
        settings["fault_file"] = file
    return settings
