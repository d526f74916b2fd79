"""Running a service in a child process where this process leads its process group.

Supervisors signal whole groups. Ray's daemons must then not be in the group
(``own_process_group``), and a group's leader cannot leave it: the leader waits, its child serves.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    raise SystemExit(code if code >= 0 else 128 - code)
