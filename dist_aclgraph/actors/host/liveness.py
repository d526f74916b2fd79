"""Finds out whether other processes are alive, by three mechanisms:

- ``Silence`` measures how long a peer has sent no heartbeat over a link.
- ``SharedHeartbeat`` is memory in which a child process shows its heartbeats to its parent.
- A *process watch* notices the end of a process at once, because the kernel reports the end.

``Lease`` finds out whether this process itself may still act. The lease expires if the controller
requests no heartbeats from this process for some time.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from dist_aclgraph.environment import raylet_pid

BEATS_OF_A_SILENCE = 20  # a peer counts as dead after this number of missed heartbeats
WATCH_MS = 1000  # milliseconds between two checks whether the watch should stop

logger = logging.getLogger(__name__)


def beat_s(limit_s: float) -> float:
    """Return the seconds between two heartbeats. A peer is dead after a silence of ``limit_s``."""
    return limit_s / BEATS_OF_A_SILENCE


class Silence:
    """Measures how long a peer has been silent while this process listened.

    If this process was stopped or got no CPU time for a while, this time does not count as silence.

    Args:
        limit_s: maximum silence in seconds.
        clock: monotonic, in seconds.
        every_s: usual number of seconds between two calls of ``listen``, by default the interval
            between heartbeats. One call adds at most twice this time to the silence.
    """

    def __init__(
        self,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        every_s: float | None = None,
    ) -> None:
        self.limit_s = limit_s
        self._turn_s = 2 * (beat_s(limit_s) if every_s is None else every_s)
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        self.silent_s, self._turned_s = 0.0, self._clock()

    def listen(self) -> bool:
        """Add the time since the last call to the silence. Return whether the silence is too long.

        Must be called about every ``every_s`` seconds.
        """
        turned_s, self._turned_s = self._turned_s, self._clock()
        self.silent_s += min(self._turned_s - turned_s, self._turn_s)
        return self.silent_s > self.limit_s


class Beat(Protocol):
    """A function that shows a heartbeat of this process, and whether the process serves."""

    def __call__(self, *, serves: bool = True) -> None: ...


class SharedHeartbeat:
    """A byte in memory that a parent process shares with its child. The child changes the byte
    again and again as a heartbeat.

    The parent creates this object before it forks the child. Only the parent calls ``begin`` and
    ``listen``.

    Args:
        limit_s: maximum silence in seconds.
        clock: monotonic, in seconds.

    Attributes:
        served_before: whether a previous child process has served.
    """

    # Values of the byte. REST: no heartbeat is expected. Each heartbeat adds 1 to the byte; FIRST
    # follows LAST.
    REST, FIRST, LAST = 0, 1, 255

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        # The first byte is the heartbeat. The second byte is 1 if the process has served.
        self._shared = mmap.mmap(-1, 2)
        self._seen = self.REST
        self._silence = Silence(limit_s, clock)
        self.served_before = False

    def beat(self, *, serves: bool = True) -> None:
        """Show a heartbeat. From now on, the parent expects heartbeats."""
        self._shared[0] = self._shared[0] % self.LAST + 1
        self._shared[1] |= serves

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Show heartbeats on a thread within this context. The thread shows heartbeats even if the
        body of the context hangs. So the body must limit its own time.
        """
        has_ended = threading.Event()

        def run() -> None:
            while not has_ended.wait(beat_s(self._silence.limit_s)):
                self.beat(serves=False)

        self.beat(serves=False)
        thread = threading.Thread(target=run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self.rest()

    def rest(self) -> None:
        """Expect no heartbeat until ``beat`` is called again."""
        self._shared[0] = self.REST

    def begin(self) -> None:
        """Prepare for the next child process. Its first heartbeat is expected at once."""
        self.served_before |= self.has_served
        self._shared[:] = bytes([self.FIRST, False])
        self._seen = self.REST
        self._silence.heard()

    @property
    def has_served(self) -> bool:
        """Whether the current child process has reported that it serves."""
        return bool(self._shared[1])

    def listen(self) -> bool:
        """Check whether the child has shown a heartbeat. Return whether its silence is too long.

        Must be called about every ``beat_s`` seconds.
        """
        before, self._seen = self._seen, self._shared[0]
        if self._seen == before != self.REST:
            return self._silence.listen()
        self._silence.heard()
        return False


class Lease:
    """Says whether this process (the holder) may act, e.g. as a group's engine. Thread-safe.

    The process that gave the lease (the giver) renews the lease by numbered questions. The giver
    sends a question after the previous question was answered. The lease begins with the first
    question. After ``limit_s`` without a question, the holder does not hold the lease, and must do
    nothing. After ``2 * limit_s`` without a question, the lease is over.

    While the holder is stopped (SIGSTOP), the giver may replace the holder by another process. When
    the holder runs again, it may first read a question that the giver sent before the replacement.
    So only the second question after the stop renews the lease.

    Attributes:
        is_given_back: whether ``give_back`` has ended the lease on purpose.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.look_s = beat_s(limit_s)
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen_s = clock()
        self._renewed_s: float | None = None
        self._number = 0  # number of the last question
        self._counts_from = 0  # number of the first question that renews the lease
        self.is_given_back = False
        # Counts silence only while this process runs. So a stop of this process does not end the
        # lease. The giver can renew the lease after the stop.
        self._silence = Silence(2 * limit_s, clock)

    def renew(self, number: int) -> None:
        """Record that a question of the giver has arrived. Renew the lease if the giver must have
        sent the question after the holder's last stop.
        """
        with self._lock:
            now_s = self._see()
            self._number = number
            if number >= self._counts_from:
                self._renewed_s = now_s
                self._silence.heard()

    def is_held(self) -> bool:
        with self._lock:
            now_s = self._see()
            return self._renewed_s is None or now_s - self._renewed_s <= self._limit_s

    def give_back(self) -> None:
        """End the lease on purpose. After this call, ``leave_with`` does not end the process."""
        self.is_given_back = True

    def look(self) -> bool:
        """Return whether the lease is over. One thread calls this every ``look_s`` seconds."""
        with self._lock:
            self._see()
            if self._renewed_s is None or self.is_given_back:
                return False
            return self._silence.listen()

    def _see(self) -> float:
        """Return the present time. If this process was stopped since the last call, the next
        question does not renew the lease.
        """
        now_s = self._clock()
        if now_s - self._seen_s > self._limit_s:
            # The process that gave the lease may have sent the next question during the stop. So
            # the first question after the stop does not renew the lease, but the second question
            # does.
            self._counts_from = self._number + 2
        self._seen_s = now_s
        return now_s


def leave_with(lease: Lease, who: str, clean: Callable[[], None] = lambda: None) -> None:
    """Start a thread that checks the lease, and that ends this process when the lease is over.

    Args:
        clean: a function that removes the files of this process; called before the end.
    """

    def watch() -> None:
        while not lease.look():
            if lease.is_given_back:
                return
            time.sleep(lease.look_s)
        logger.error("the controller has not asked for %s for too long: it ends itself", who)
        clean()
        os._exit(1)

    threading.Thread(target=watch, name="lease", daemon=True).start()


def leave_with_raylet() -> None:
    """End this process when its raylet ends. If there is no raylet, end this process when its
    parent ends.
    """

    def leave(name: str) -> None:
        os._exit(1)

    watch_processes({raylet_pid() or os.getppid(): "raylet"}, leave)


def watch_processes(
    names: dict[int, str], on_death: Callable[[str], None], stop: threading.Event | None = None
) -> None:
    """Watch processes on a thread. When the first process ends, call ``on_death`` once with the
    name of this process.

    Args:
        names: maps process ids to names of processes.
        stop: an event that ends the watch.
    """
    fd_to_name: dict[int, str] = {}
    for pid, name in names.items():
        try:
            fd_to_name[os.pidfd_open(pid)] = name
        except ProcessLookupError:
            on_death(name)
            return
    threading.Thread(
        target=_watch, args=(fd_to_name, on_death, stop), name="process-watch", daemon=True
    ).start()


def _watch(
    fd_to_name: dict[int, str], on_death: Callable[[str], None], stop: threading.Event | None
) -> None:
    poll = select.poll()
    for fd in fd_to_name:
        poll.register(fd, select.POLLIN)
    ready: list[tuple[int, int]] = []
    while not ready and not (stop is not None and stop.is_set()):
        ready = poll.poll(WATCH_MS)
    first = fd_to_name[ready[0][0]] if ready else ""
    for fd in fd_to_name:
        os.close(fd)
    if first and not (stop is not None and stop.is_set()):
        on_death(first)
