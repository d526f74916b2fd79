"""Reads the PCI addresses of this machine's NPUs from the driver's management library (DCMI).

The library is loaded into this process; reading the addresses opens no device. torch_npu reads the
addresses in the same way (NPUInterruptAffinity.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_int, c_ubyte, c_uint
from pathlib import Path
from typing import Any

DCMI = Path("/usr/local/dcmi/libdcmi.so")
MAX_CARDS = 64


class _PcieInfo(ctypes.Structure):
    """DCMI's struct ``dcmi_pcie_info_all``."""

    _fields_ = (
        ("vendor", c_uint),
        ("subvendor", c_uint),
        ("device_kind", c_uint),
        ("subdevice_kind", c_uint),
        ("domain", c_int),
        ("bus", c_uint),
        ("device", c_uint),
        ("function", c_uint),
        ("reserved", c_ubyte * 32),
    )


def pci_addresses() -> list[str]:
    """Return the PCI addresses of the NPUs, e.g. 0000:c1:00.0, in the order of the NPUs' ids.

    Returns:
        An empty list if the driver does not report the addresses.
    """
    try:
        dcmi = ctypes.CDLL(str(DCMI))
        return list(_addresses(dcmi))
    # The library or one of its functions is missing, or a function has failed.
    except (OSError, AttributeError):
        return []


def _addresses(dcmi: ctypes.CDLL) -> Iterator[str]:
    """Yield the addresses of all chips, card by card. A card of an A3 has two chips.

    Raises:
        AttributeError: the library lacks a function.
        OSError: a function has failed.
    """
    _call(dcmi.dcmi_init)
    count, cards = c_int(), (c_int * MAX_CARDS)()
    _call(dcmi.dcmi_get_card_num_list, byref(count), cards, MAX_CARDS)
    for card in cards[: count.value]:
        chips, controller, cpu = c_int(), c_int(), c_int()
        _call(dcmi.dcmi_get_device_id_in_card, card, byref(chips), byref(controller), byref(cpu))
        for chip in range(chips.value):
            info = _PcieInfo()
            _call(dcmi.dcmi_get_device_pcie_info_v2, card, chip, byref(info))
            yield f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.{info.function:x}"


def _call(function: Any, *arguments: Any) -> None:
    if code := function(*arguments):
        raise OSError(code, function.__name__)
