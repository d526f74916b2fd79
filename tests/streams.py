"""Occupies stream ids of the emulated device, so that only a given number of ids is free."""

from __future__ import annotations

import ctypes
from typing import Any

from dist_aclgraph.device import emulator


class HeldStreams:
    """Within this context, all stream ids of the device except ``left`` are occupied.

    If the device counts software queues, the context first empties the pool of queues from earlier
    graphs. Then there are as many free queues as free ids.
    """

    def __init__(self, left: int) -> None:
        self._left = left
        self._acl: Any = ctypes.CDLL("libascendcl.so")
        self._handles: list[ctypes.c_void_p] = []

    def __enter__(self) -> HeldStreams:
        while not self._acl.aclrtCreateStream(ctypes.byref(handle := ctypes.c_void_p())):
            self._handles.append(handle)
        assert ids_left() == 0
        while ids_left() < self._left:
            self._free_one()
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._free_one()

    def _free_one(self) -> None:
        assert self._acl.aclrtDestroyStream(self._handles.pop()) == 0


def ids_left() -> int:
    """Return the number of free stream ids of the device, as the emulator counts them."""
    return emulator.counters()["available"]
