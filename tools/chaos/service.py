"""A service under test. It runs in separate processes, which the rig starts as a user would start
them.

The service leads a process session, and on each machine, all temporary files of its processes are
in one folder. So the rig can distinguish the processes and files of the service from other
processes and files.
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
from dist_aclgraph.files.shipped import shipped
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
    """The machines on which a service runs: this machine, or several hosts."""

    def start_service(self, command: list[str], folder: Path, log: Any) -> subprocess.Popen[Any]:
        """Start the service in a new process session. Its output goes to the file ``log``."""

    def stop_service(self, process: subprocess.Popen[Any]) -> None:
        """Send SIGTERM to the service. ``process`` is the result of ``start_service``."""

    def pids_of_service(self, leader: int, folder: Path) -> set[int]:
        """Return the living processes of the service whose session has this leader."""

    def daemons(self) -> set[int]:
        """Return Ray's daemons; an empty set if the service has started Ray itself."""

    def memories(self) -> Iterator[tuple[Path, Callable[[], set[int]]]]:
        """For each host, yield the folder of its shared memory, and a function that returns the ids
        of the host's living processes. The ids are the ids in the host's own PID namespace.
        """

    def temporary(self, folder: Path) -> list[Path]:
        """Return the folders in which processes of the service create their run directories."""


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
        """Return the number of groups that accept requests; 0 if the service does not answer."""
        try:
            reply = self._http.get("/ready")
            return int(reply.json()["groups"]["serving"]) if reply.is_success else 0
        except (httpx.HTTPError, ValueError, KeyError):
            return 0

    def look(self) -> Sight:
        at_s = time.monotonic()
        return Sight(at_s, self.serving())

    def metrics(self) -> dict[str, float]:
        """Return the gauges and counters of the service, summed over their labels; empty if it does
        not answer.
        """
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
        """Return the last output line that says why the service has ended, or ""."""
        lines = [line for line in self.last_words().splitlines() if line.startswith("error:")]
        return lines[-1] if lines else ""

    # ---- the service's processes

    def pids(self, name: str) -> list[int]:
        """Return the processes of the service and of its Ray whose names begin with ``name``. The
        oldest comes first.
        """
        found = self._all() | self._place.daemons()
        return sorted(p for p in found if processes.name_of(p).startswith(name))

    def by_name(self) -> dict[str, list[int]]:
        """Return the ids of the service's living processes. The keys are the names of the
        processes. A process that runs a script has the name of the script's file.
        """
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
        """Return HCCL's shared memory segments whose creators have exited. Segments from before the
        start of the service are left out.
        """
        # Other services create segments, too, but the processes that created these segments are
        # alive. The living processes are listed after the segments. Otherwise, the list might lack
        # the creator of a new segment.
        found = []
        for memory, living in self._place.memories():
            if new := sorted(_segments(memory) - self._segments):
                pids = living()
                found += [segment for segment in new if _maker_of(segment) not in pids]
        return found

    def segments(self) -> set[Path]:
        """Return HCCL's shared memory segments that were created after the start of the service."""
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
        """Return the run directories whose owners have exited."""
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
        """Disarm the fault. Return True if it was still armed, and False if it had happened
        already.
        """
        try:
            self.fault_file.unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- the service's end

    def end(self) -> list[str]:
        """Stop the service, and kill it if necessary. Return the files and processes that it has
        left behind.
        """
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
        """End all living processes of the service. Return True if no process was alive.

        A process that is being started now may appear only later, so the caller repeats this call.
        """
        alive = self._all()
        processes.kill_all(alive)
        return not alive

    def _left_behind(self) -> list[str]:
        """Return the files and processes that the ended service has left behind.

        First waits a moment, because files and processes may still disappear.
        """
        wait_for(lambda: not self._all(), END_S)
        left = [f"process {processes.name_of(pid)}" for pid in sorted(self._all())]
        left += [f"shared memory {segment.name}" for segment in self.dead_segments()]
        left += [f"{path.name} of {path.parent.name}" for path in self._run_directories()]
        if _is_taken(self._port):
            left.append("its port")
        return left


def wait_for(condition: Callable[[], bool], seconds: float, pause_s: float = LOOK_S) -> bool:
    """Wait until the condition is true, for at most ``seconds``. Return whether it became true."""
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
    """Return the file name of the script that a Python process runs; "" if it runs none."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if word.endswith(".py")), "")
    return ""


def _segments(memory: Path) -> set[Path]:
    """Return HCCL's segments in a folder of shared memory."""
    found = memory.iterdir() if memory.is_dir() else ()
    return {path for path in found if path.name.startswith(SEGMENTS)}


def _maker_of(segment: Path) -> int:
    """Return the id of the process that created a segment. The id is part of the segment's name; 0
    if the name contains no id.
    """
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
