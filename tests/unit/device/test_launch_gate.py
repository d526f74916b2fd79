"""A device is stopped only while no thread launches work. While the device is stopped, every launch
waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dist_aclgraph.device.launch_gate import LaunchGate
from dist_aclgraph.errors import DeviceError

WAIT_S, MOMENT_S = 120.0, 0.2


class Beside:
    """Makes a call in a separate thread, and keeps its error."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.error: DeviceError | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except DeviceError as e:
            self.error = e

    def is_over(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def test_a_stop_waits_for_what_is_launched() -> None:
    gate = LaunchGate()
    with gate.launching():
        stop = Beside(lambda: gate.close(WAIT_S))
        assert not stop.is_over(MOMENT_S)

    assert stop.is_over(WAIT_S) and stop.error is None


def test_a_waiting_thread_delays_no_stop_and_launches_nothing_after_it() -> None:
    gate, waits, may_go_on = LaunchGate(), threading.Event(), threading.Event()
    launched: list[str] = []

    def step() -> None:
        with gate.launching():
            launched.append("before")
            with gate.waiting():
                waits.set()
                may_go_on.wait(WAIT_S)
            launched.append("behind")

    step_beside = Beside(step)
    assert waits.wait(WAIT_S)
    gate.close(WAIT_S)
    may_go_on.set()

    assert step_beside.is_over(WAIT_S)
    assert "the device was stopped" in str(step_beside.error)
    assert launched == ["before"]


def test_an_error_of_the_wait_is_not_hidden_by_the_stop() -> None:
    gate = LaunchGate()
    with pytest.raises(ValueError, match="FORCE STOP"), gate.launching(), gate.waiting():
        gate.close(WAIT_S)
        raise ValueError("FORCE STOP")


def test_a_closed_gate_lets_nobody_in_until_it_is_opened() -> None:
    gate = LaunchGate()
    gate.close(WAIT_S)
    for _ in range(2):
        with pytest.raises(DeviceError, match="stopped"), gate.launching():
            pytest.fail("work was launched to a device that was stopped")
    gate.open()
    with gate.launching(), gate.waiting():
        pass


def test_a_stop_does_not_wait_for_ever_for_a_thread_that_always_launches() -> None:
    gate = LaunchGate()
    with gate.launching():
        stop = Beside(lambda: gate.close(MOMENT_S))
        assert stop.is_over(WAIT_S)
    assert "has launched work for 0.2 s without a pause" in str(stop.error)
    with gate.launching():
        pass


def test_a_thread_that_does_not_launch_may_wait_for_the_device() -> None:
    gate = LaunchGate()

    def wait() -> None:
        with gate.waiting():
            pass

    with gate.launching():
        other = Beside(wait)
        assert other.is_over(WAIT_S) and other.error is None
