"""Streams of the emulated device, taken so that tests find as few as they ask for."""

from __future__ import annotations

import ctypes
from typing import Any

from dist_aclgraph.device import emulator


class HeldStreams:
    """While open, holds all stream ids of the device but ``left``.

    With software queues it first drains the pool that graphs before have left behind, so that as
    many queues are free as ids.
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
    """Return the stream ids that the device has left, by the emulator's own count."""
    return emulator.counters()["available"]
