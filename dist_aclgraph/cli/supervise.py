"""Running a service in a child process where this process leads its process group.

Supervisors signal whole groups. Ray's daemons must then not be in the group
(``own_process_group``), and a group's leader cannot leave it: the leader waits, its child serves.
Where that is killed, the leader ends what it had started and can end no more.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from dist_aclgraph.actors import processes, run_directory

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
FORWARDED = (signal.SIGINT, signal.SIGTERM)


def call_outside_of_lead(serve: Callable[[], None]) -> None:
    """Call ``serve``, in a child process where this one leads its group; exit as the child does.

    To be called before threads exist.
    """
    if os.getpgrp() != os.getpid():
        serve()
        return
    # A signal that comes between the fork and the handlers waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # Whoever loses its parent becomes a child of ours, so that we know all that the service starts.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        # If the leader is killed, the service drains and stops.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            serve()
        finally:
            # A group's signal comes twice, from its sender and from the leader: not after all.
            for number in FORWARDED:
                signal.signal(number, signal.SIG_IGN)
        return
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = _wait_for(child)
    if code < 0:
        _end_orphans()
    raise SystemExit(code if code >= 0 else 128 - code)


def _wait_for(child: int) -> int:
    """Return how a child has ended; orphans that end before it are not kept as zombies."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_orphans() -> None:
    while orphans := processes.children(os.getpid()):
        processes.kill_all(orphans)
        for pid in orphans:
            os.waitpid(pid, 0)
    run_directory.sweep()
