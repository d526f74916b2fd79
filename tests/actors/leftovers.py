"""Checks that all processes of a deployment have ended, and that its NPUs are free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import ray

NPUS = 8.0  # NPUs of the session's cluster
WAIT_S = 180.0


def wait_until(
    condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = WAIT_S
) -> None:
    """Wait until the condition is true. If it stays false, fail with the text ``what``, or with the
    result of calling ``what``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what() if callable(what) else what
        time.sleep(0.05)


def free_npus() -> float:
    return ray.available_resources().get("NPU", 0.0)


def assert_all_npus_are_free(npus: float = NPUS) -> None:
    """Wait until ``npus`` NPUs are free; by default, until all NPUs are free."""
    wait_until(lambda: free_npus() >= npus, f"of {npus:g} NPUs some are still held")


def assert_processes_are_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} is still there")


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status
