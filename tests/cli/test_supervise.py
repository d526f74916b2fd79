"""The supervisor of a service, with an owner and an ingress that only wait."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.liveness import SharedHeartbeat
from dist_aclgraph.cli import ingress
from dist_aclgraph.cli.supervise import CRASHED, SETTLED_S, Supervisor
from dist_aclgraph.planning.restarts import FIRST_PAUSE_S, RestartBudget
from dist_aclgraph.serve.http.front import Front
from tests.actors.leftovers import assert_processes_are_gone, wait_until
from tests.slow import slow

MARK = "TEST_OF_SUPERVISION"  # environment variable of all processes of a service
OWNER, INGRESS = "serve:owner", "serve:ingress"
WAIT_S, BEATS_S = 60.0, 2.0

PARTS = r"""
SILENT_S = END_S = 60.0
NUM_INGRESSES = 1
END_STARTED = lambda: None
import logging, os, select, signal, subprocess, sys, time
from dist_aclgraph.cli.supervise import Supervisor
from dist_aclgraph.errors import ConfigError, EngineDeadError, PlacementError, RayDiedError
from dist_aclgraph.planning.restarts import RestartBudget

logging.getLogger("dist_aclgraph").addHandler(logging.NullHandler())  # stderr has only sentences

def say(text):  # in one piece, as several processes speak
    os.write(1, f"{text}\n".encode())

def own(signals, heartbeat):
    heartbeat.beat()
    say("owns")
    while not signals.wait(0.1):
        heartbeat.beat()
    say("stopped in order")
    sys.exit(7)

def serve_http(life, beat, keeper):
    beat()
    say("listens")
    while not select.select([life], [], [], 0.1)[0]:
        beat()
"""
RUN = """
INGRESSES = [serve_http] * NUM_INGRESSES
sys.exit(Supervisor(own, INGRESSES, RestartBudget(2), SILENT_S, END_S, END_STARTED).run())
"""


# An owner that needs LATE_S seconds to end, and sends no heartbeat in this time.
ENDS_LATE = """
plainly = own
def own(signals, heartbeat):
    try:
        plainly(signals, heartbeat)
    finally:
        heartbeat.rest()
        time.sleep(LATE_S)
"""


class Service:
    """A service that leads its own process group, like a program of a shell or a container."""

    def __init__(self, parts: str = "") -> None:
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PARTS + parts + RUN],
            # A thread of OpenBLAS could get a signal instead of the main thread. A real fork ends
            # these threads, but a fork that a test fakes does not.
            env={**os.environ, MARK: self._mark, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def all(self) -> set[int]:
        return processes.with_variable(MARK, self._mark) & processes.living()

    def pid(self, name: str) -> int:
        [found] = self.pids(name, 1)
        return found

    def pids(self, name: str, count: int) -> set[int]:
        found: set[int] = set()

        def are_there() -> bool:
            found.clear()
            found.update(pid for pid in self.all() if processes.name_of(pid) == name)
            return len(found) == count

        wait_until(are_there, f"there is no {name}", WAIT_S)
        return found

    def kill(self, name: str) -> int:
        """Wait until a process runs, kill it, and wait for its end; return its id."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        assert_processes_are_gone([pid])
        return pid

    def lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return sorted(self.process.stdout.readline().strip() for _ in range(count))

    def end(self) -> tuple[int, str, str]:
        """Wait for the end of a service and all its processes; return exit code and output."""
        said, wrong = self.process.communicate(timeout=WAIT_S)
        wait_until(lambda: not self.all(), "a process is left", WAIT_S)
        return self.process.returncode, said, wrong


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def begin(parts: str = "") -> Service:
        started.append(Service(parts))
        return started[-1]

    yield begin
    for service in started:
        processes.kill_all(service.all())
        service.process.communicate()


Start = Callable[..., Service]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_group_that_is_signalled_stops_in_order_with_the_exit_code_of_the_owner(
    start: Start, number: signal.Signals
) -> None:
    service = start()
    assert service.lines(2) == ["listens", "owns"]

    os.killpg(service.process.pid, number)

    assert service.end() == (7, "stopped in order\n", "")


def test_a_first_process_that_is_killed_takes_the_service_with_it(start: Start) -> None:
    service = start()
    service.lines(2)

    service.process.kill()

    assert service.end() == (-signal.SIGKILL, "stopped in order\n", "")


def test_an_ingress_that_is_killed_is_replaced_beside_the_same_owner(start: Start) -> None:
    service = start()
    service.lines(2)
    owner = service.pid(OWNER)

    struck = service.kill(INGRESS)

    assert service.lines(1) == ["listens"]
    assert service.pid(INGRESS) != struck
    assert service.pid(OWNER) == owner
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert wrong == (
        "warning: the process that serves HTTP was killed by SIGKILL; it is started again\n"
    )


def test_an_ingress_that_is_killed_is_replaced_beside_other_ingresses(start: Start) -> None:
    service = start("NUM_INGRESSES = 2")
    assert service.lines(3) == ["listens", "listens", "owns"]
    owner, both = service.pid(OWNER), service.pids(INGRESS, 2)
    struck, other = sorted(both)

    os.kill(struck, signal.SIGKILL)

    assert service.lines(1) == ["listens"]
    now = service.pids(INGRESS, 2)
    assert other in now and struck not in now
    assert service.pid(OWNER) == owner
    service.process.terminate()
    code, _, wrong = service.end()
    assert code == 7
    assert wrong.count("\n") == 1 and "the process that serves HTTP was killed" in wrong


@pytest.mark.parametrize(
    ("name", "begins", "what"),
    [
        (OWNER, "owns", "the process that owns the deployment"),
        slow(INGRESS, "listens", "the process that serves HTTP"),
    ],
)
def test_what_stands_still_is_replaced(start: Start, name: str, begins: str, what: str) -> None:
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


def test_what_python_makes_up_after_a_stop_is_no_signal(start: Start) -> None:
    service = start(
        """
import types
plainly_wait, made_up = signal.sigtimedwait, [0, 4711, -5]
def wait(numbers, seconds):
    if made_up:
        return types.SimpleNamespace(si_signo=made_up.pop())
    return plainly_wait(numbers, seconds)
signal.sigtimedwait = wait
"""
    )
    service.lines(2)

    service.process.terminate()

    assert service.end() == (7, "stopped in order\n", "")


def test_an_owner_that_is_killed_is_replaced_and_what_it_had_started_is_ended(start: Start) -> None:
    service = start(
        """
plainly = own
def own(signals, heartbeat):
    # What it starts starts others, which lead sessions of their own, as Ray's daemons do.
    start = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", start])
    subprocess.Popen(["sleep", "600"])
    plainly(signals, heartbeat)
"""
    )
    service.lines(2)
    ingress = service.pid(INGRESS)
    sleepers: list[int] = []

    def are_there() -> bool:  # a process without the name "sleep" has not called exec yet
        sleepers[:] = [pid for pid in service.all() if processes.name_of(pid) == "sleep"]
        return len(sleepers) == 2

    wait_until(are_there, "what the owner starts is not there", WAIT_S)

    struck = service.kill(OWNER)

    assert service.lines(1) == ["owns"]
    assert_processes_are_gone(sleepers)
    assert service.pid(OWNER) != struck
    assert service.pid(INGRESS) == ingress
    processes.kill_all({pid for pid in service.all() if processes.name_of(pid) == "sleep"})
    service.process.terminate()
    assert service.end()[0] == 7


def test_past_the_budget_a_death_of_the_owner_ends_the_service_with_the_reason(
    start: Start,
) -> None:
    service = start()
    service.lines(2)
    for _ in range(2):
        service.kill(OWNER)
        service.lines(1)

    service.kill(OWNER)

    ended, _, wrong = service.end()
    assert ended == 128 + signal.SIGKILL
    assert "is not started again: recovery.restarts_per_hour allows 2\n" in wrong


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
    assert starts[2] - starts[0] >= FIRST_PAUSE_S  # only the first replacement starts at once
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


def test_an_owner_that_does_not_end_is_killed(start: Start) -> None:
    service = start(f"END_S, LATE_S = 2.0, 600.0\n{ENDS_LATE}")
    service.lines(2)

    service.process.terminate()

    code, _, wrong = service.end()
    assert code == 128 + signal.SIGKILL
    assert (
        "error: the process that owns the deployment has not ended for 2 s; it is killed" in wrong
    )


def test_children_from_before_are_left_alone(start: Start) -> None:
    """If a shell replaces itself by the service (exec), the service gets the shell's children."""
    service = start(
        """
helper = subprocess.Popen(["sleep", "600"])
say(str(helper.pid))
"""
    )
    (helper, *_) = service.lines(3)

    service.kill(OWNER)
    assert service.lines(1) == ["owns"]

    assert int(helper) in processes.living()
    service.process.terminate()
    service.process.wait(WAIT_S)
    processes.kill_all({int(helper)})


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


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_signal_while_another_owner_starts_ends_everything(
    start: Start, whole_group: bool
) -> None:
    service = start()
    service.lines(2)
    service.kill(OWNER)

    if whole_group:
        os.killpg(service.process.pid, signal.SIGTERM)
    else:
        service.process.terminate()

    ended, _, _ = service.end()
    # The exit code comes from the new owner, or from the killed owner if the supervisor noticed the
    # signal first.
    assert ended in (7, 128 + signal.SIGTERM, 128 + signal.SIGKILL)


def test_what_forks_for_owners_stays_and_what_it_has_forked_goes_with_them(start: Start) -> None:
    service = start(
        """
from dist_aclgraph.actors.forks.fork_server import ForkAddress
from dist_aclgraph.actors.host import processes
FORKING = '''
import signal, subprocess, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
child.send_signal(signal.SIGSTOP)
print(child.pid, flush=True)
time.sleep(600)
'''
server = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True)
say(f"{server.pid} {server.stdout.readline().strip()}")
END_STARTED = ForkAddress("", server.pid, processes.start_of(server.pid), {}).end_forked
"""
    )
    server, forked = map(int, service.lines(3)[0].split())

    service.kill(OWNER)

    assert service.lines(1) == ["owns"]
    assert_processes_are_gone([forked])
    assert server in processes.living()
    service.process.terminate()
    service.process.wait(WAIT_S)
    processes.kill_all({server})


def test_orphans_that_end_while_the_service_runs_do_not_stay_as_zombies(start: Start) -> None:
    service = start(
        """
plainly = own
def own(signals, heartbeat):
    nested = "import subprocess; subprocess.Popen(['sleep', '0.2'])"
    subprocess.run([sys.executable, "-c", nested])
    plainly(signals, heartbeat)
"""
    )
    service.lines(2)

    wait_until(lambda: len(processes.children(service.process.pid)) == 2, "a zombie stays")

    service.process.terminate()
    assert service.end()[0] == 7


def test_ingresses_that_live_for_long_between_their_deaths_come_back_without_longer_pauses() -> (
    None
):
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(100), 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].began_s = time.monotonic() - 2 * SETTLED_S

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert supervisor._ingresses[0].due_s <= time.monotonic() + FIRST_PAUSE_S


def test_ingresses_that_die_at_their_start_come_back_after_longer_and_longer_pauses() -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(100), 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].began_s = time.monotonic()

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert supervisor._ingresses[0].due_s > time.monotonic() + 2 * FIRST_PAUSE_S


def test_an_ingress_that_has_served_is_replaced_however_often_it_dies() -> None:
    restarts = RestartBudget(2)
    supervisor = Supervisor(Mock(), [Mock()], restarts, 60.0, 60.0)
    for _ in range(20):
        supervisor._ingresses[0].heartbeat.begin()
        supervisor._ingresses[0].heartbeat.beat()

        assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) is None

    assert restarts.num_left(time.monotonic()) == 2, "these restarts are the owner's"


def test_an_ingress_that_only_listens_uses_the_budget() -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(2), 60.0, 60.0)
    codes = []
    for _ in range(3):
        supervisor._ingresses[0].heartbeat.begin()
        supervisor._ingresses[0].heartbeat.beat(serves=False)
        codes.append(supervisor._replace_ingress(supervisor._ingresses[0], CRASHED))

    assert codes == [None, None, 1]


def test_an_ingress_serves_only_after_its_api_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = SharedHeartbeat(60.0)
    heartbeat.begin()
    seen = []

    class Server:
        def __init__(self, limits: Any, listener: Any, beat: Callable[[], None], _: Any) -> None:
            self._beat = beat

        def start(self, front: Front) -> None:
            self._front = front
            self._beat()

        def stop(self) -> None:
            seen.append(heartbeat.has_served)
            self._front.open(Mock())
            self._beat()

    monkeypatch.setattr(ingress, "HttpServer", Server)
    monkeypatch.setattr(ingress, "OwnerClient", Mock())
    monkeypatch.setattr(ingress, "_wait_for_deployment", Mock(side_effect=RuntimeError))

    with pytest.raises(RuntimeError):
        ingress.serve_http(MagicMock(), 0, heartbeat.beat)

    assert seen == [False]
    assert heartbeat.has_served


@pytest.mark.parametrize("has_served", [True, False])
def test_a_service_without_restarts_does_not_replace_its_ingress(has_served: bool) -> None:
    supervisor = Supervisor(Mock(), [Mock()], RestartBudget(0), 60.0, 60.0)
    if has_served:
        supervisor._ingresses[0].heartbeat.beat()

    assert supervisor._replace_ingress(supervisor._ingresses[0], -signal.SIGKILL) == 1
