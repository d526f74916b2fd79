"""A lock that prevents threads from launching work while another thread stops the device.

Stopping a device removes its queued work, but the device still runs work that is launched after the
stop. That work would use inputs whose copies were aborted, and could, for example, write to the KV
cache slots of an earlier step. Before a thread stops the device, this thread waits until no other
thread launches work. Then no thread can launch work until the device works again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dist_aclgraph.errors import DeviceError

STOPPED = "the device was stopped: nothing is launched before it works again"


class LaunchGate:
    """A lock, called the gate. A thread holds this lock while the thread launches work. The thread
    releases the lock before a wait for the device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # id of the launching thread
        self._is_closed = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch work inside this context.

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
        """Inside this context, the thread waits for the device, and launches no work. Even a thread
        that does not hold the gate may use this context.

        Raises:
            DeviceError: the gate was closed while the thread waited.
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
        """Wait until no thread launches work, and close the gate. While the gate is closed, no
        thread can launch work.

        Raises:
            DeviceError: a thread was still launching work after ``timeout_s``.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise DeviceError(f"the host has launched work for {timeout_s:g} s without a pause")
        self._is_closed = True
        self._lock.release()

    def open(self) -> None:
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
