"""The supervisor replaces processes that are stopped, but not processes that are allowed to be
silent.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.cli.supervised import INGRESS, OWNER, Start
from tests.slow import slow

BEATS_S = 2.0

# An owner that needs LATE_S seconds to end, and sends no heartbeats while it ends.
ENDS_LATE = """
plainly = own
def own(signals, heartbeat):
    try:
        plainly(signals, heartbeat)
    finally:
        heartbeat.rest()
        time.sleep(LATE_S)
"""


@pytest.mark.parametrize(
    ("name", "begins", "what"),
    [
        (OWNER, "owns", "the process that owns the deployment"),
        slow(INGRESS, "listens", "the process that serves HTTP"),
    ],
)
def test_a_stopped_process_is_replaced(start: Start, name: str, begins: str, what: str) -> None:
    service = start("SILENT_S = 3.0")
    service.lines(2)
    struck = service.pid(name)

    os.kill(struck, signal.SIGSTOP)

    assert service.lines(1) == [begins]
    assert service.pid(name) != struck
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert f"{what} has stood still for 3 s; it is killed\n" in wrong


STANDS_STILL_FIRST = """
SILENT_S = 3.0
import mmap
starts = mmap.mmap(-1, 1)
def stand_still_in(start):
    starts[0] += 1
    if starts[0] == start:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_an_ingress_that_stands_still_before_its_first_sign_is_replaced(start: Start) -> None:
    service = start(
        STANDS_STILL_FIRST
        + """
plainly = serve_http
def serve_http(life, beat, keeper):
    stand_still_in(1)
    plainly(life, beat, keeper)
"""
    )

    assert service.lines(2) == ["listens", "owns"]
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert "serves HTTP has stood still for 3 s; it is killed\n" in wrong


@pytest.mark.slow
def test_an_owner_that_stands_still_while_it_starts_is_replaced(start: Start) -> None:
    service = start(
        STANDS_STILL_FIRST
        + """
plainly = own
def own(signals, heartbeat):
    with heartbeat.starting():
        time.sleep(5.0)  # which is no silence
        stand_still_in(2)
    plainly(signals, heartbeat)
"""
    )
    service.lines(2)
    service.kill(OWNER)

    assert service.lines(1) == ["owns"]
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert wrong.count("the deployment has stood still for 3 s; it is killed\n") == 1


def test_an_owner_that_stands_still_does_not_hold_up_the_end(start: Start) -> None:
    service = start("SILENT_S = 3.0")
    service.lines(2)

    os.kill(service.pid(OWNER), signal.SIGSTOP)
    service.process.terminate()

    assert service.end()[0] == 128 + signal.SIGKILL


@pytest.mark.slow
def test_an_owner_that_drains_gives_no_sign_and_is_left_alone(start: Start) -> None:
    service = start(f"SILENT_S, LATE_S = 2.0, 5.0\n{ENDS_LATE}")
    service.lines(2)

    service.process.terminate()

    assert service.end() == (7, "stopped in order\n", "")


@pytest.mark.slow
def test_a_service_that_was_stopped_as_a_whole_goes_on(start: Start) -> None:
    service = start("SILENT_S = 2.0")
    service.lines(2)
    ingress = service.pid(INGRESS)
    time.sleep(BEATS_S)

    os.killpg(service.process.pid, signal.SIGSTOP)
    time.sleep(2 * BEATS_S)
    os.killpg(service.process.pid, signal.SIGCONT)
    time.sleep(2 * BEATS_S)

    assert service.pid(INGRESS) == ingress
    service.process.terminate()
    assert service.end()[0] == 7


def test_an_owner_that_does_not_end_is_killed(start: Start) -> None:
    service = start(f"END_S, LATE_S = 2.0, 600.0\n{ENDS_LATE}")
    service.lines(2)

    service.process.terminate()

    code, _, wrong = service.end()
    assert code == 128 + signal.SIGKILL
    assert (
        "error: the process that owns the deployment has not ended for 2 s; it is killed" in wrong
    )
