"""Whether other processes live: every wait for a sign of life, and every watch over a process.

There are three mechanisms. A *silence* counts how long a peer sends no sign of life over a link. A
*heartbeat* is the sign of life of a child process, in memory that it shares with its parent. A
*process watch* learns of the end of a process at once, from the kernel. A *lease* is the other side
of a silence: the process that sends the signs may act only while it is asked for them.
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

from dist_aclgraph.environment import raylet_pid

BEATS_OF_A_SILENCE = 20  # signs of life that a peer misses before it counts as dead
WATCH_MS = 1000  # between two checks whether the watch is to stop

logger = logging.getLogger(__name__)


def beat_s(limit_s: float) -> float:
    """Return how often to give a sign of life, or to look for one, where silence has a limit."""
    return limit_s / BEATS_OF_A_SILENCE


class Silence:
    """How long a peer has been silent, without the time in which this process did not listen.

    A process that was stopped, or that starved, must not blame its peers for it.

    Args:
        limit_s: more is too long.
        clock: in seconds; does not go back.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._turn_s = 2 * beat_s(limit_s)  # the most that one turn of the listener counts
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        self.silent_s, self._turned_s = 0.0, self._clock()

    def listen(self) -> bool:
        """Count a turn in which nothing was heard; return whether the silence is too long.

        To be called about every ``beat_s``.
        """
        turned_s, self._turned_s = self._turned_s, self._clock()
        self.silent_s += min(self._turned_s - turned_s, self._turn_s)
        return self.silent_s > self.limit_s


class SharedHeartbeat:
    """A byte in memory that a process shares with its parent: the process changes it all the time.

    Made by the parent, before the process is forked. ``begin`` and ``listen`` are the parent's.

    Args:
        limit_s: silence of more than that is too long.
        clock: in seconds; does not go back.
    """

    REST, FIRST, LAST = 0, 1, 255  # values of the byte; at rest, no sign is expected

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = mmap.mmap(-1, 2)  # the byte, and whether the process serves
        self._seen = self.REST
        self._silence = Silence(limit_s, clock)

    def beat(self, *, serves: bool = True) -> None:
        """Give a sign. More of them are expected from now on."""
        self._shared[0] = self._shared[0] % self.LAST + 1
        self._shared[1] |= serves

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Beat from a thread within this context, whose work has its own limits."""
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
        """Have no sign expected until the next one."""
        self._shared[0] = self.REST

    def begin(self) -> None:
        """Belong to a process that is forked next. Its first sign is expected at once."""
        self._shared[:] = bytes([self.FIRST, False])
        self._seen = self.REST
        self._silence.heard()

    @property
    def has_served(self) -> bool:
        """Whether the process has given a sign that it serves."""
        return bool(self._shared[1])

    def listen(self) -> bool:
        """Look for a sign, about every ``beat_s``; return whether silence has been too long."""
        before, self._seen = self._seen, self._shared[0]
        if self._seen == before != self.REST:
            return self._silence.listen()
        self._silence.heard()
        return False


class Lease:
    """Whether the holder of a place may act. All methods: any thread.

    The process that gave the place renews the lease by numbered questions, and sends the next one
    once the last was answered. The lease begins with the first question. Without a question for
    ``limit_s`` the lease is not held, and the holder does nothing; after as long again the lease is
    over. A holder that was stopped cannot know whether the place was given away meanwhile, and the
    next question may have been sent before that: only the question after it renews the lease.

    Attributes:
        is_given_back: see ``give_back``.

    Args:
        clock: in seconds; does not go back.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.look_s = beat_s(limit_s)
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen_s = clock()
        self._renewed_s: float | None = None
        self._number = 0  # of the last question
        self._counts_from = 0  # the first question that renews
        self.is_given_back = False
        # The holder's own stops do not end the lease: the process that gave the place decides.
        self._silence = Silence(2 * limit_s, clock)

    def renew(self, number: int) -> None:
        """Answer a question."""
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
        """End the lease: its holder acts no more by it, and ``leave_with`` ends no process."""
        self.is_given_back = True

    def look(self) -> bool:
        """Return whether the lease is over; for one thread, every ``look_s``."""
        with self._lock:
            self._see()
            if self._renewed_s is None or self.is_given_back:
                return False
            return self._silence.listen()

    def _see(self) -> float:
        """Return the time, and find out whether this process was stopped until now."""
        now_s = self._clock()
        if now_s - self._seen_s > self._limit_s:
            self._counts_from = self._number + 2  # the next question may have been sent before
        self._seen_s = now_s
        return now_s


def leave_with(lease: Lease, who: str) -> None:
    """End this process once the lease is over; a thread checks it."""

    def watch() -> None:
        while not lease.look():
            if lease.is_given_back:
                return
            time.sleep(lease.look_s)
        logger.error("the controller has not asked for %s for too long: it ends itself", who)
        os._exit(1)

    threading.Thread(target=watch, name="lease", daemon=True).start()


def leave_with_raylet() -> None:
    """End this process at once when its raylet ends; without a raylet, when its parent ends."""

    def leave(name: str) -> None:
        os._exit(1)

    watch_processes({raylet_pid() or os.getppid(): "raylet"}, leave)


def watch_processes(
    names: dict[int, str], on_death: Callable[[str], None], stop: threading.Event | None = None
) -> None:
    """Call ``on_death`` with the name of the first of these processes that ends, on a thread.

    Args:
        names: by process id.
        stop: ends the watch, once set.
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
