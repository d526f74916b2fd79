"""Keeping launches and the stop of a device apart.

What is queued on a device is gone when it is stopped; what is launched behind that runs. A launch
that was under way meanwhile would run on inputs that never came: a write to the KV cache would go
to the slots of an earlier step. So a device is stopped while nobody launches, and nobody launches
before it works again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dist_aclgraph.errors import DeviceError

STOPPED = "the device was stopped: nothing is launched before it has come back"


class LaunchGate:
    """Who launches holds it, but for the time in which the host waits for the device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # id of the thread that launches
        self._is_closed = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch work inside.

        Raises:
            DeviceError: the gate is closed.
        """
        self._enter()
        try:
            self._check()
            yield
        finally:
            self._leave()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the device inside, and launch nothing. Any thread may, also one that does not
        hold the gate.

        Raises:
            DeviceError: the gate was closed meanwhile.
        """
        if self._holder != threading.get_ident():
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()
        self._check()

    def close(self, timeout_s: float) -> None:
        """Return when nobody launches; nobody does from now on.

        Raises:
            DeviceError: somebody launches for longer.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise DeviceError(f"the host has launched work for {timeout_s:g} s without a pause")
        self._is_closed = True
        self._lock.release()

    def open(self) -> None:
        """Let launches through again."""
        self._is_closed = False

    def _enter(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def _check(self) -> None:
        if self._is_closed:
            raise DeviceError(STOPPED)

    def _leave(self) -> None:
        self._holder = None
        self._lock.release()
