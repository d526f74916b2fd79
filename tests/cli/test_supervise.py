"""A leader of a process group serves from a child; signals to the group stop it in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
