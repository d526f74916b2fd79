"""A leader of a process group serves from a child; signals to the group stop it in order."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

from dist_aclgraph.actors import processes
from tests.actors.leftovers import wait_until

SERVICE = """
import signal, sys, time
from dist_aclgraph.cli.supervise import call_outside_of_lead

def serve():
    import os
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    print("leads" if os.getpgrp() == os.getpid() else "follows", flush=True)
    while not stopping:
        time.sleep(0.05)
    print("stopped in order", flush=True)
    sys.exit(7)

call_outside_of_lead(serve)
"""


def start(**options: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", SERVICE], stdout=subprocess.PIPE, text=True, **options
    )


def test_a_group_that_is_signalled_stops_in_order_with_the_service_exit_code() -> None:
    process = start(start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "follows\n"

    os.killpg(process.pid, signal.SIGTERM)

    assert process.wait(timeout=20) == 7
    assert process.stdout.read() == "stopped in order\n"


def test_a_leader_that_is_killed_takes_the_service_with_it() -> None:
    process = start(start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()

    process.kill()

    # The pipe closes when the child, too, has ended.
    assert process.stdout.read() == "stopped in order\n"
    process.wait(timeout=20)


def test_a_process_that_leads_nothing_serves_itself() -> None:
    process = start()
    assert process.stdout is not None
    assert process.stdout.readline() == "follows\n"

    process.terminate()

    assert process.wait(timeout=20) == 7


MARK = "TEST_OF_ORPHANS"

ORPHAN = """
import os, signal, subprocess, sys
from dist_aclgraph.cli.supervise import call_outside_of_lead

def serve():
    # What it starts starts others, which lead sessions of their own, as Ray's daemons do.
    start = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", start])
    subprocess.Popen(["sleep", "600"])
    os.kill(os.getpid(), signal.SIGKILL)

call_outside_of_lead(serve)
"""


def test_nothing_outlives_a_service_that_is_killed() -> None:
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], env={**os.environ, MARK: mark}, start_new_session=True
    )
    try:
        assert process.wait(timeout=60) == 128 + signal.SIGKILL
        assert processes.with_variable(MARK, mark) == set()
    finally:
        processes.kill_all(processes.with_variable(MARK, mark))


def test_orphans_that_end_while_the_service_runs_do_not_stay_as_zombies() -> None:
    code = SERVICE.replace(
        "    while not stopping:",
        "    import subprocess\n"
        "    nested = \"import subprocess; subprocess.Popen(['sleep', '0.2'])\"\n"
        "    subprocess.run([sys.executable, '-c', nested])\n"
        "    while not stopping:",
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()

    wait_until(lambda: len(processes.children(process.pid)) == 2, "no orphan has come")
    wait_until(lambda: len(processes.children(process.pid)) == 1, "a zombie stays")

    process.terminate()
    assert process.wait(timeout=20) == 7
