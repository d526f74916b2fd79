"""A service under test, in separate processes, which the rig starts like a user.

The service leads a process session, and all temporary files of its processes are in one folder. So
the rig can distinguish the service's processes and files from other processes and files.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from dist_aclgraph.actors.host import processes, run_directory
from dist_aclgraph.environment import environment_with
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.shipped import shipped
from tools.chaos.outcome import Sight
from tools.chaos.shapes import Shape

START_S, END_S, LOOK_S, ANSWER_S = 240.0, 60.0, 0.05, 10.0
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = ("emulated_hccl_", "meeting_of_")  # prefixes of the names of HCCL's segments
TEMPORARY = "TMPDIR"
QUOTED_LINES = 15


class ChaosError(DistAclGraphError):
    """The rig cannot continue."""


class Service:
    """Owns the processes of a service, and the folder of their temporary files.

    Args:
        folder: an empty folder with a short path, because paths of sockets are limited.
    """

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.fault_file = folder / "armed"
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._segments = _segments()
        self._log = folder / "log"
        config = shipped("configs") / f"{shape.config}.yaml"
        command = [
            *(sys.executable, "-m", "dist_aclgraph.cli.main", "serve", str(config)),
            *shape.overrides,
            f"device.emulator.fault.file={self.fault_file}",
            f"--port={self._port}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_with({TEMPORARY: str(folder)}),
                start_new_session=True,
            )
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
        """Return the service's processes whose names begin with the prefix, oldest first."""
        return sorted(p for p in self._all() if processes.name_of(p).startswith(name))

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
        """Return all living processes in the service's session or with its temporary folder."""
        leader = self._process.pid
        own = {pid for pid in processes.living() if _session_of(pid) == leader}
        return own | processes.with_variable(TEMPORARY, str(self.folder))

    def dead_segments(self) -> list[str]:
        """Return HCCL's segments that were made since the start by processes that have exited."""
        # Other services can also make segments, but their processes are alive.
        return sorted(name for name in _segments() - self._segments if _is_dead(name))

    def segments(self) -> set[str]:
        """Return HCCL's segments that were made since the start."""
        return _segments() - self._segments

    def num_run_directories(self) -> int:
        return len(run_directory.directories(self.folder))

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
        for path in run_directory.directories(self.folder):
            with run_directory.held_if_free(path) as is_free:
                if is_free:
                    found.append(path.name)
        return sorted(found)

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
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        left = self._left_behind()
        self.kill()
        return left

    def kill(self) -> None:
        self._http.close()
        wait_for(self._kill_once, END_S)
        self._process.wait(END_S)
        for name in self.dead_segments():
            (SHARED_MEMORY / name).unlink(missing_ok=True)
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
        left += [f"shared memory {name}" for name in self.dead_segments()]
        found = run_directory.directories(self.folder)
        left += [f"{path.name} of {self.folder.name}" for path in found]
        if _is_taken(self._port):
            left.append("its port")
        return left


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition became true within the given time."""
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_S)
    return True


def new_folder(parent: Path | None) -> Path:
    """Return a new folder with a short path for a service's temporary files."""
    return Path(tempfile.mkdtemp(prefix="s-", dir=parent))


def _session_of(pid: int) -> int:
    """Return the session of a process; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def _script_of(pid: int) -> str:
    """Return the file name of the script that a Python process runs, or ""."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((Path(word).name for word in words if word.endswith(".py")), "")
    return ""


def _segments() -> set[str]:
    found = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {path.name for path in found if path.name.startswith(SEGMENTS)}


def _is_dead(segment: str) -> bool:
    """Whether the process that a segment's name identifies has exited."""
    with contextlib.suppress(ValueError, OSError):
        name = segment
        if not segment.startswith(SEGMENTS[0]):
            name = (SHARED_MEMORY / segment).read_text()
        return not processes.name_of(int(name.removeprefix(SEGMENTS[0]).partition("_")[0]))
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
