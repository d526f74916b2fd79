"""Processes of this machine: finding them, handles of them, ending them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h


def set_name(name: str) -> None:
    """Set the name of this process, as ``name_of`` and ``ps`` show it; the kernel keeps 15
    bytes.
    """
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def signal_with_parent(number: signal.Signals, parent: int) -> None:
    """Have this process signalled when its parent ends, or now where it has ended."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of processes whose parents were descendants of this process and end."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value)


def children(parent: int) -> set[int]:
    """Return the processes that ``parent`` has started, and that live."""
    return {pid for pid in _all() if _parent_of(pid) == parent}


def living() -> set[int]:
    """Return all processes that run here; none that has ended and waits for its parent."""
    return {pid for pid in _all() if _stat_of(pid)[:1] not in ([], ["Z"])}


def is_running(pid: int) -> bool:
    """Whether a process is there, and neither stopped nor over."""
    return _stat_of(pid)[:1] not in ([], ["T"], ["t"], ["Z"], ["X"])


def start_of(pid: int) -> int:
    """Return when a process was started, in ticks of the system's clock; 0 where there is none.

    With its id it means one process: ids are given again.
    """
    fields = _stat_of(pid)
    return int(fields[19]) if fields else 0


def session_of(pid: int) -> int:
    """Return the session of a process, 0 where there is none."""
    fields = _stat_of(pid)
    return int(fields[3]) if fields else 0


def name_of(pid: int) -> str:
    """Return the file name of the program that runs, "" where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def with_variable(name: str, value: str) -> set[int]:
    """Return this user's processes that were started with an environment variable."""
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in _all():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def open_handles(pids: set[int]) -> list[int]:
    """Return handles of processes, which unlike ids never refer to other processes."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def kill_handles(handles: list[int]) -> None:
    """End these processes now, where they have not ended, and close the handles."""
    while handles:
        handle = handles.pop()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def end_process(handle: int, timeout_s: float) -> bool:
    """End a process now, a stopped one too; return whether it has ended, in that time."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _all() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _parent_of(pid: int) -> int:
    fields = _stat_of(pid)
    return int(fields[1]) if fields else 0


def _stat_of(pid: int) -> list[str]:
    """Return what /proc says of a process from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
