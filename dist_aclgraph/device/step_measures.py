"""Measurements of a step: the host's time in each stage, how long the device waited, and the
emulator's counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dist_aclgraph.device import emulator
from dist_aclgraph.device.npu import runtime

# The stages of a step on a worker's host, in order: update the rows of the requests; make and send
# inputs; pad lengths; run eagerly, or queue a graph's replay and its updates; sample; wait for a
# result and read it.
WORKER_STAGES = (
    "rows",
    "inputs",
    "upload",
    "lengths",
    "forward",
    "replay",
    "update",
    "sample",
    "read",
)


@dataclass
class Stopwatch:
    """Measures the host time of each stage of a step, in microseconds. While it is disabled, it
    reads no clock.

    Attributes:
        stages: host time of each stage of a step, from the plan's arrival to the result.
        beside: host time, since the last report, of each kind of work that belongs to no stage.
            Such work runs at the same time as a step, or between two steps.
        on_lap: called with the name of each stage that has ended, even if the stopwatch is
            disabled.
    """

    enabled: bool
    stages: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    last_s: float = 0.0
    on_lap: Callable[[str], None] | None = None

    def start(self) -> None:
        if self.enabled:
            self.stages = {}
            self.last_s = time.perf_counter()

    def lap(self, stage: str) -> float:
        """Add the time since the last lap to ``stage``, and return this time."""
        if self.on_lap is not None:
            self.on_lap(stage)
        if not self.enabled:
            return 0.0
        now_s = time.perf_counter()
        duration_us = (now_s - self.last_s) * 1e6
        self.stages[stage] = self.stages.get(stage, 0.0) + duration_us
        self.last_s = now_s
        return duration_us

    def lap_of(self, stages: dict[str, float], stage: str) -> None:
        """Add the time since the last lap to the time of ``stage`` in another step. ``stages``
        contains that step's times.
        """
        own, self.stages = self.stages, stages
        self.lap(stage)
        self.stages = own

    def book(self, what: str, duration_us: float) -> None:
        """Add the duration of the work ``what`` to ``beside``."""
        if self.enabled:
            self.beside[what] = self.beside.get(what, 0.0) + duration_us

    def take_overlapped(self) -> dict[str, float]:
        taken, self.beside = self.beside, {}
        return taken


@dataclass
class ReplaySpan:
    """Two events of a step on hardware: one recorded at the start of the step's replay, one after
    the step's last update.

    Attributes:
        has_updates: whether at least one update was sent after the replay.
    """

    begin: Any = None
    end: Any = None
    has_updates: bool = False


class UpdateWait:
    """Measures how long the device waits, during the replay of a graph, for updates of the graph's
    tasks.

    Only the emulator measures this time exactly. On hardware, the value is the time between the two
    events of ``ReplaySpan``. This value is an upper bound, because the device also computes between
    these events.
    """

    def __init__(self, is_counted: bool) -> None:
        self._is_counted = is_counted
        self._taken_ns = self._counted_ns() if is_counted else 0

    def begin(self, main_stream: Any) -> ReplaySpan:
        """Call this before a step's first replay is queued."""
        if self._is_counted:
            return ReplaySpan()
        begin, end = (runtime().Event(enable_timing=True) for _ in range(2))
        begin.record(main_stream)
        return ReplaySpan(begin, end)

    def end(self, span: ReplaySpan, update_stream: Any, num_behind: int) -> None:
        """Call this after the step's updates were queued. ``num_behind`` is the number of these
        updates that were queued after the replay.
        """
        span.has_updates = num_behind > 0
        if span.has_updates and not self._is_counted:
            span.end.record(update_stream)

    def take_us(self, span: ReplaySpan) -> float:
        """Return how long the device waited for updates in a finished step.

        On the emulator, the result is the sum of all waits since the previous call.
        """
        if self._is_counted:
            before_ns, self._taken_ns = self._taken_ns, self._counted_ns()
            return (self._taken_ns - before_ns) / 1e3
        if not span.has_updates:
            return 0.0
        span.end.synchronize()
        return max(0.0, float(span.begin.elapsed_time(span.end)) * 1e3)

    @staticmethod
    def _counted_ns() -> int:
        return emulator.counters()["external_wait_ns"]


class DeviceCounts:
    """The emulator's counts of a step; hardware reports no counts. The emulator counts collectives,
    and the bytes that collectives receive from other ranks. If the emulator models time, the counts
    include the device's busy time, and the device's idle time for each cause.
    """

    def __init__(self, is_counted: bool) -> None:
        self._is_counted = is_counted
        self._before = self._read() if is_counted else {}

    def skip(self) -> None:
        """Set the counters to zero, without returning their values."""
        self.read_and_reset()

    def read_and_reset(self) -> dict[str, int]:
        """Return the counts since the last call. If the device has already begun the next step, the
        result includes counts of the next step.
        """
        if not self._is_counted:
            return {}
        before, self._before = self._before, self._read()
        return {name: n - before[name] for name, n in self._before.items()}

    @staticmethod
    def _read() -> dict[str, int]:
        return {
            name: value
            for name, value in emulator.counters().items()
            if name in ("collectives", "collective_bytes") or name.startswith("modelled_")
        }
