"""A signal is recorded, even if it arrives at the beginning or at the end of a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dist_aclgraph.cli.signals import Signals

WAIT_S = 180.0

# In each turn, the timer's signal arrives a little later than in the previous turn. So the signals
# hit every point of a wait.
UNDER_FIRE = """
import signal
from dist_aclgraph.cli.signals import Signals

for number in range(5000):
    with Signals() as signals:
        signal.signal(signal.SIGALRM, signals._receive)
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + number % 100 * 1e-6)
        while not signals.wait(0.00001):
            pass
print("over", signals.received)
"""


def test_a_signal_may_come_at_any_moment_of_a_wait() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UNDER_FIRE], capture_output=True, text=True, timeout=WAIT_S
    )

    assert (ended.stdout, ended.stderr) == ("over 14\n", "")


def test_the_first_that_has_come_stays() -> None:
    with Signals() as signals:
        assert not signals.wait(0.0)

        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.stop()

        assert signals.wait(0.0)
        assert signals.received == signal.SIGINT


@pytest.mark.parametrize(("prefix", "wanted"), [([], "True"), (["nohup"], "False")])
def test_a_closed_terminal_stops_a_service_unless_nohup_started_it(
    heard_signals: None, prefix: list[str], wanted: str
) -> None:
    code = "import signal; from dist_aclgraph.cli.signals import SIGNALS; "
    code += "print(signal.SIGHUP in SIGNALS)"

    ended = subprocess.run(
        [*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )

    assert ended.stdout == f"{wanted}\n"


def test_the_handler_of_the_first_signal_may_raise() -> None:
    calls = []

    def stop() -> None:
        calls.append(signals.received)
        raise KeyboardInterrupt

    with Signals() as signals:
        signals.on_first = stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            signals.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    assert calls == [signal.SIGTERM]


def test_to_stop_is_as_if_a_signal_had_come() -> None:
    with Signals() as signals:
        signals.stop()

        assert signals.wait(0.0)
        assert signals.received == signal.SIGTERM
