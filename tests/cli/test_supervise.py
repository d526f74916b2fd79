"""The supervisor replaces processes that die, and passes signals on."""

from __future__ import annotations

import os
import signal

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import assert_processes_are_gone, wait_until
from tests.cli.supervised import INGRESS, OWNER, WAIT_S, Start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_group_that_is_signalled_stops_in_order_with_the_exit_code_of_the_owner(
    heard_signals: None, start: Start, number: signal.Signals
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


def test_invalid_signal_numbers_from_python_are_ignored(start: Start) -> None:
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

    def are_there() -> bool:  # a child that is not yet named "sleep" has not called exec
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


def test_children_from_before_are_left_alone(start: Start) -> None:
    """If a shell calls exec to become the service, the shell's children become children of the
    service.
    """
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
    # The exit code is that of the new owner. If the supervisor gets the signal before it starts a
    # new owner, the exit code is that of the killed owner.
    assert ended in (7, 128 + signal.SIGTERM, 128 + signal.SIGKILL)


def test_the_fork_server_outlives_an_owner_but_its_forked_processes_do_not(start: Start) -> None:
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
