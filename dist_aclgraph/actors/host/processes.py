"""Finds processes on this machine, opens handles of processes, and ends processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # constants of linux/prctl.h


def set_name(name: str) -> None:
    """Set the name of this process, which ``name_of`` and ``ps`` show.

    The kernel keeps only 15 bytes of the name.
    """
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def signal_with_parent(number: signal.Signals, parent: int) -> None:
    """Let this process receive a signal when its parent ends, or at once if the parent has already
    ended.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value)


def children(parent: int) -> set[int]:
    """Return the ids of the processes that ``parent`` started and that still exist."""
    return {pid for pid in _all() if _parent_of(pid) == parent}


def living() -> set[int]:
    """Return the ids of all processes on this machine, except zombies."""
    return {pid for pid in _all() if _stat_of(pid)[:1] not in ([], ["Z"])}


def is_running(pid: int) -> bool:
    """Return whether a process runs; False for a stopped process and for a zombie."""
    return _stat_of(pid)[:1] not in ([], ["T"], ["t"], ["Z"], ["X"])


def start_of(pid: int) -> int:
    """Return the start time of a process, in clock ticks; 0 if there is no such process.

    Process ids are reused, but id and start time together identify one process.
    """
    fields = _stat_of(pid)
    return int(fields[19]) if fields else 0


def name_of(pid: int) -> str:
    """Return the name of a process; "" if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def with_variable(name: str, value: str) -> set[int]:
    """Return the ids of this user's processes that started with this environment variable."""
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in _all():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def open_handles(pids: set[int]) -> list[int]:
    """Return handles of processes. Unlike an id, a handle never refers to another process."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def kill_handles(handles: list[int]) -> None:
    """Kill these processes now if they have not ended, and close the handles."""
    while handles:
        handle = handles.pop()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def end_process(handle: int, timeout_s: float) -> bool:
    """Kill a process, even if it is stopped; return whether it ended within ``timeout_s``."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def kill_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0


def count_open_files(pid: int) -> int:
    """Return how many files a process has open; 0 if the process has ended or is another user's."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def host_memory() -> tuple[int, int]:
    """Return two sizes in bytes: the size of this machine's memory, and the size of the memory that
    programs can still allocate.
    """
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(kib) << 10 for name, kib, *_ in lines}
    return sizes["MemTotal:"], sizes["MemAvailable:"]


def _all() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _parent_of(pid: int) -> int:
    fields = _stat_of(pid)
    return int(fields[1]) if fields else 0


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the process's state; empty if there is no
    such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
