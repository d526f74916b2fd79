"""Lists and repairs device memory with errors that the hardware cannot correct (UCE).

A repair replaces the memory at the faulty addresses, so its contents are lost. CANN's list does not
contain page sizes. This module assumes the largest page size for all ranges.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dist_aclgraph.device.kind import DeviceKind
from dist_aclgraph.errors import DeviceError

# CANN's MAX_MEM_UCE_INFO_ARRAY_SIZE. CANN records at most 20 addresses per device.
MAX_RANGES = 128
RESERVED_WORDS = 14  # UCE_INFO_RESERVED_SIZE
NOT_SUPPORTED = 207000  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT: the driver is too old
PAGE_BYTES: dict[DeviceKind, int] = {"npu": 2 << 20, "emulated": 4096}


class MemoryRange(NamedTuple):
    """A range of device addresses, from ``begin`` up to, but not including, ``end``."""

    begin: int
    end: int

    def pages(self, page_bytes: int) -> MemoryRange:
        """Return the whole pages that contain the range."""
        return MemoryRange(
            self.begin // page_bytes * page_bytes, -(-self.end // page_bytes) * page_bytes
        )


def lies_in(wanted: Sequence[MemoryRange], parts: Iterable[MemoryRange]) -> bool:
    """Return whether the ranges in ``parts`` together contain all ranges in ``wanted``.

    A wanted range may be divided among several adjacent parts.
    """
    merged: list[MemoryRange] = []
    for part in sorted(parts):
        if merged and part.begin <= merged[-1].end:
            merged[-1] = MemoryRange(merged[-1].begin, max(merged[-1].end, part.end))
        else:
            merged.append(part)
    return all(any(m.begin <= w.begin and w.end <= m.end for m in merged) for w in wanted)


def touches(wanted: Sequence[MemoryRange], parts: Iterable[MemoryRange]) -> bool:
    """Return whether at least one range in ``parts`` overlaps a range in ``wanted``."""
    return any(w.begin < p.end and p.begin < w.end for p in parts for w in wanted)


class _Info(ctypes.Structure):  # aclrtMemUceInfo
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
        ("reserved", ctypes.c_size_t * RESERVED_WORDS),
    )


class BadMemory:
    """Queries CANN's runtime about device 0, and requests repairs. Keeps no state."""

    def __init__(self, acl: ctypes.CDLL, kind: DeviceKind) -> None:
        self._acl = acl
        self._page_bytes = PAGE_BYTES[kind]

    def ranges(self) -> tuple[MemoryRange, ...]:
        """Return the faulty memory, in whole pages; empty if CANN is too old to list faulty memory.

        Raises:
            DeviceError: CANN returns no list, for example after an error that cannot be repaired.
        """
        infos, count = self._told()
        return tuple(
            MemoryRange(info.address or 0, (info.address or 0) + info.num_bytes).pages(
                self._page_bytes
            )
            for info in infos[:count]
        )

    def repair(self) -> None:
        """Repair the faulty memory, and verify the repair. All tasks must be aborted before the
        call.

        This method calls CANN's repair function, because only older versions of torch_npu always
        repair memory in ``restart_device``. Newer versions leave the repair to the caller if CANN
        has ``aclrtRepairError`` and the chip is older than Ascend950.

        Raises:
            DeviceError: some memory stays faulty.
        """
        infos, count = self._told()
        if not count:
            return
        code = self._acl.aclrtMemUceRepair(0, infos, ctypes.c_size_t(count))
        if code:
            raise DeviceError(f"faulty memory could not be repaired: {code}")
        _, count = self._told()
        if count:
            raise DeviceError(f"memory at {count} addresses is as faulty as before its repair")

    def _told(self) -> tuple[ctypes.Array[_Info], int]:
        infos, count = (_Info * MAX_RANGES)(), ctypes.c_size_t()
        try:
            tell = self._acl.aclrtGetMemUceInfo
        except AttributeError:
            return infos, 0
        code = tell(0, infos, ctypes.c_size_t(MAX_RANGES), ctypes.byref(count))
        if code == NOT_SUPPORTED:
            return infos, 0
        if code:
            raise DeviceError(f"CANN does not tell which memory is faulty: {code}")
        return infos, count.value
