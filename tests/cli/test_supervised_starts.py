"""What the supervisor does if owners and ingresses fail at their start, or cannot be started at
all.
"""

from __future__ import annotations

import signal

import pytest

from dist_aclgraph.planning.restarts import FIRST_PAUSE_S
from tests.cli.supervised import INGRESS, OWNER, Start
from tests.slow import slow


def test_ingresses_that_are_killed_at_their_start_come_after_pauses(start: Start) -> None:
    service = start(
        """
def serve_http(life, beat, keeper):
    say(f"listens {time.monotonic()}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )

    ended, said, wrong = service.end()

    starts = [float(line.split()[1]) for line in said.splitlines() if "listens" in line]
    assert ended == 1
    assert len(starts) == 3
    assert starts[2] - starts[0] >= FIRST_PAUSE_S  # a pause precedes the second replacement
    assert wrong.count("the process that serves HTTP was killed by SIGKILL") == 3


def test_an_ingress_that_fails_by_an_unforeseen_error_is_replaced(start: Start) -> None:
    service = start(
        """
import mmap
starts = mmap.mmap(-1, 1)
plainly = serve_http
def serve_http(life, beat, keeper):
    starts[0] += 1
    if starts[0] == 1:
        raise MemoryError
    plainly(life, beat, keeper)
"""
    )

    assert service.lines(2) == ["listens", "owns"]
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert "MemoryError" in wrong
    assert "warning: the process that serves HTTP has failed; it is started again\n" in wrong


@pytest.mark.parametrize("failing", [1, 2, slow(3)], ids=["owner", "ingress", "second ingress"])
def test_a_process_that_cannot_be_made_is_made_later(start: Start, failing: int) -> None:
    service = start(
        f"""
import errno
forks, plainly_fork = [0], os.fork
def fork():
    forks[0] += 1
    if forks[0] == {failing}:
        raise OSError(errno.EAGAIN, "no process is free")
    return plainly_fork()
os.fork = fork
"""
    )
    assert service.lines(2) == ["listens", "owns"]
    owner = service.pid(OWNER)

    service.kill(INGRESS)

    assert service.lines(1) == ["listens"]
    assert service.pid(OWNER) == owner
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert wrong.count("cannot be started (no process is free); tried again in ") == 1


def test_a_signal_while_no_owner_can_be_made_ends_everything(start: Start) -> None:
    service = start(
        """
import errno
plainly_fork = os.fork
def fork():
    raise OSError(errno.EAGAIN, "no process is free")
os.fork = fork
"""
    )
    assert service.process.stderr is not None
    assert "cannot be started" in service.process.stderr.readline()

    service.process.terminate()

    assert service.end()[0] == 128 + signal.SIGTERM


LOSES_RAY = """
def own(signals, heartbeat):
    heartbeat.beat()
    say("owns")
    raise RayDiedError("the raylet has died")
"""


def test_an_owner_that_loses_its_ray_is_replaced_until_no_restart_is_left(start: Start) -> None:
    ended, said, wrong = start(LOSES_RAY).end()

    assert ended == 1
    assert said.count("owns") == 3
    assert wrong.count("error: the raylet has died") == 3
    assert (
        wrong.count("warning: the service has lost its Ray; the deployment is started again") == 2
    )


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise ConfigError('no such key')", 2),
        ("raise RayDiedError('the raylet has died')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_a_start_that_fails_is_not_tried_again(start: Start, ending: str, code: int) -> None:
    service = start(f"\ndef own(signals, heartbeat):\n    say('owns')\n    {ending}\n")

    ended, said, wrong = service.end()

    assert (ended, said.count("owns") <= 1) == (code, True)
    assert "again" not in wrong


@pytest.mark.parametrize("error", ["EngineDeadError", "PlacementError"])
def test_a_deployment_that_does_not_come_up_again_is_tried_again(start: Start, error: str) -> None:
    service = start(
        f"""
import mmap
starts = mmap.mmap(-1, 1)
plainly = own
def own(signals, heartbeat):
    starts[0] += 1
    if starts[0] == 2:
        raise {error}("there is no room yet")
    plainly(signals, heartbeat)
"""
    )
    service.lines(2)

    service.kill(OWNER)

    assert service.lines(1) == ["owns"]
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert "error: there is no room yet\n" in wrong
    assert "warning: another one did not come up; the deployment is started again\n" in wrong


def test_an_owner_that_ends_with_an_error_is_not_replaced(start: Start) -> None:
    ended, said, wrong = start(LOSES_RAY.replace("RayDied", "EngineDead")).end()

    assert (ended, said.count("owns")) == (1, 1)
    assert wrong == "error: the raylet has died\n"


def test_an_ingress_that_fails_by_itself_ends_the_service_in_order(start: Start) -> None:
    service = start(
        "\ndef serve_http(life, beat, keeper):\n    raise ConfigError('it cannot listen')\n"
    )

    ended, said, wrong = service.end()

    assert ended == 2
    assert "stopped in order" in said
    assert wrong == "error: it cannot listen\n"
