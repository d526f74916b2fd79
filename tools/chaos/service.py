"""A service under test, in separate processes, which the rig starts like a user.

The service leads a process session. On one machine, all temporary files of its processes are in one
folder. So the rig can distinguish the service's processes and files from other processes and files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx

from dist_aclgraph.actors.host import processes, run_directory
from dist_aclgraph.environment import environment_with
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.shipped import shipped
from tools.chaos.hosts import SHARED_MEMORY, session
from tools.chaos.outcome import Sight
from tools.chaos.shapes import Shape

START_S, END_S, LOOK_S, ANSWER_S = 240.0, 60.0, 0.05, 10.0
SEGMENTS = ("emulated_hccl_", "meeting_of_")  # prefixes of the names of HCCL's segments
TEMPORARY = "TMPDIR"
QUOTED_LINES = 15


class ChaosError(DistAclGraphError):
    """The rig cannot continue."""


class Place(Protocol):
    """Where a service runs: on this machine, or on several hosts."""

    def start_service(self, command: list[str], folder: Path, log: Any) -> subprocess.Popen[Any]:
        """Start the service in a new session, with its output in the file ``log``."""

    def stop_service(self, process: subprocess.Popen[Any]) -> None:
        """Send SIGTERM to the service that ``start_service`` returned."""

    def pids_of_service(self, leader: int, folder: Path) -> set[int]:
        """Return the living processes of the service with this leader of its session."""

    def daemons(self) -> set[int]:
        """Return the processes of a Ray that is not the service's own."""

    def memories(self) -> Iterator[tuple[Path, Callable[[], set[int]]]]:
        """For each host, yield the folder of its shared memory, and a function that returns the
        ids of the host's living processes, as its own processes see them.
        """

    def temporary(self, folder: Path) -> list[Path]:
        """Return the folders in which the processes of the service make run directories."""


class ThisMachine:
    """The service starts its own Ray on this machine."""

    def start_service(self, command: list[str], folder: Path, log: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment_with({TEMPORARY: str(folder)}),
            start_new_session=True,
        )

    def stop_service(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGTERM)

    def pids_of_service(self, leader: int, folder: Path) -> set[int]:
        return session(leader) | processes.with_variable(TEMPORARY, str(folder))

    def daemons(self) -> set[int]:
        return set()

    def memories(self) -> Iterator[tuple[Path, Callable[[], set[int]]]]:
        yield Path(SHARED_MEMORY), processes.living

    def temporary(self, folder: Path) -> list[Path]:
        return [folder]


class Service:
    """Owns the processes of a service, and the folder of their temporary files.

    Args:
        folder: an empty folder with a short path, because paths of sockets are limited.
        place: where the service runs.
    """

    def __init__(self, shape: Shape, folder: Path, place: Place | None = None) -> None:
        self.shape = shape
        self.folder = folder
        self._place: Place = place or ThisMachine()
        self.fault_file = folder / "armed"
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._segments = self._all_segments()
        self._log = folder / "log"
        config = shipped("configs") / f"{shape.config}.yaml"
        command = [
            *(sys.executable, "-m", "dist_aclgraph.cli.main", "serve", str(config)),
            *shape.overrides,
            f"device.emulator.fault.file={self.fault_file}",
            f"--port={self._port}",
        ]
        with self._log.open("wb") as log:
            self._process = self._place.start_service(command, folder, log)
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S)

    # ---- the service's output

    def wait_until_ready(self) -> None:
        """Return once all groups serve.

        Raises:
            ChaosError: the service did not start; the message contains the last lines of its
                output.
        """
        if not wait_for(lambda: self.serving() == self.shape.num_groups or self.has_ended, START_S):
            raise ChaosError(f"the service is not ready after {START_S:g} s: {self.last_words()}")
        if self.has_ended:
            raise ChaosError(f"the service has ended at its start: {self.last_words()}")

    def serving(self) -> int:
        """Return the number of groups that accept requests, 0 if the service does not answer."""
        try:
            reply = self._http.get("/ready")
            return int(reply.json()["groups"]["serving"]) if reply.is_success else 0
        except (httpx.HTTPError, ValueError, KeyError):
            return 0

    def look(self) -> Sight:
        at_s = time.monotonic()
        return Sight(at_s, self.serving())

    def metrics(self) -> dict[str, float]:
        """Return gauges and counters, summed over their labels; empty without an answer."""
        try:
            lines = self._http.get("/metrics").text.splitlines()
        except httpx.HTTPError:
            return {}
        found: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("dist_aclgraph_")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-QUOTED_LINES:])

    def error(self) -> str:
        """Return the last output line that gives the reason for the end of the service, or ""."""
        lines = [line for line in self.last_words().splitlines() if line.startswith("error:")]
        return lines[-1] if lines else ""

    # ---- the service's processes

    def pids(self, name: str) -> list[int]:
        """Return the processes whose names begin with the prefix, of the service and of its Ray,
        oldest first.
        """
        found = self._all() | self._place.daemons()
        return sorted(p for p in found if processes.name_of(p).startswith(name))

    def by_name(self) -> dict[str, list[int]]:
        """Return the service's living processes by name; a script has the name of its file."""
        found: dict[str, list[int]] = {}
        for pid in self._all():
            name = processes.name_of(pid)
            if pid == self._process.pid:
                name = "supervisor"
            elif name.startswith("python"):
                name = _script_of(pid) or name
            found.setdefault(name, []).append(pid)
        return found

    def _all(self) -> set[int]:
        return self._place.pids_of_service(self._process.pid, self.folder)

    def memories(self) -> list[Path]:
        """Return the folder of shared memory of each host."""
        return [memory for memory, _ in self._place.memories()]

    def dead_segments(self) -> list[Path]:
        """Return HCCL's segments that were made since the start by processes that have exited."""
        # Other services can also make segments, but their processes are alive. The living processes
        # are listed after the segments, because a new process can make a new segment.
        found = []
        for memory, living in self._place.memories():
            if new := sorted(_segments(memory) - self._segments):
                pids = living()
                found += [segment for segment in new if _maker_of(segment) not in pids]
        return found

    def segments(self) -> set[Path]:
        """Return HCCL's segments that were made since the start."""
        return self._all_segments() - self._segments

    def _all_segments(self) -> set[Path]:
        return {segment for memory in self.memories() for segment in _segments(memory)}

    def num_run_directories(self) -> int:
        return len(self._run_directories())

    def temporary_bytes(self) -> int:
        """Return the size of all temporary files, which include Ray's logs."""
        size = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return size

    def dead_run_directories(self) -> list[str]:
        """Return directories whose owners have exited."""
        found = []
        for path in self._run_directories():
            with run_directory.held_if_free(path) as is_free:
                if is_free:
                    found.append(path.name)
        return sorted(found)

    def _run_directories(self) -> list[Path]:
        folders = self._place.temporary(self.folder)
        return [path for folder in folders for path in run_directory.directories(folder)]

    # ---- faults of emulated NPUs

    def arm(self, **words: Any) -> None:
        """Arm a fault; see ``fault_file`` in emulator/README.md."""
        new = self.fault_file.with_suffix(".new")
        new.write_text(" ".join(f"{key}={value}" for key, value in words.items()))
        new.rename(self.fault_file)

    def disarm(self) -> bool:
        """Disarm the fault; return true if the fault had not happened yet."""
        try:
            self.fault_file.unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- the service's end

    def end(self) -> list[str]:
        """Stop the service, and kill it if necessary; return what the service left behind."""
        self._http.close()
        if not self.has_ended:
            self._place.stop_service(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        left = self._left_behind()
        self.kill()
        return left

    def kill(self) -> None:
        self._http.close()
        wait_for(self._kill_once, END_S)
        self._process.wait(END_S)
        for segment in self.dead_segments():
            segment.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_once(self) -> bool:
        """End all living processes; return whether there was none.

        The caller repeats this call, because a process that is being started appears later.
        """
        alive = self._all()
        processes.kill_all(alive)
        return not alive

    def _left_behind(self) -> list[str]:
        """Return the files and processes that the ended service has left behind.

        The function first waits a moment, because files and processes can still disappear.
        """
        wait_for(lambda: not self._all(), END_S)
        left = [f"process {processes.name_of(pid)}" for pid in sorted(self._all())]
        left += [f"shared memory {segment.name}" for segment in self.dead_segments()]
        left += [f"{path.name} of {path.parent.name}" for path in self._run_directories()]
        if _is_taken(self._port):
            left.append("its port")
        return left


def wait_for(condition: Callable[[], bool], seconds: float, pause_s: float = LOOK_S) -> bool:
    """Return whether the condition became true within the given time."""
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(pause_s)
    return True


def new_folder(parent: Path | None) -> Path:
    """Return a new folder with a short path for a service's temporary files."""
    return Path(tempfile.mkdtemp(prefix="s-", dir=parent))


def _script_of(pid: int) -> str:
    """Return the file name of the script that a Python process runs, or ""."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if word.endswith(".py")), "")
    return ""


def _segments(memory: Path) -> set[Path]:
    """Return HCCL's segments in a folder of shared memory."""
    found = memory.iterdir() if memory.is_dir() else ()
    return {path for path in found if path.name.startswith(SEGMENTS)}


def _maker_of(segment: Path) -> int:
    """Return the process that a segment's name identifies; 0 if the name identifies none."""
    with contextlib.suppress(ValueError, OSError):
        name = segment.name if segment.name.startswith(SEGMENTS[0]) else segment.read_text()
        return int(name.removeprefix(SEGMENTS[0]).partition("_")[0])
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
