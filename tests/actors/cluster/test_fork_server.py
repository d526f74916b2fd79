"""Workers are forked from one server process. If forking is impossible, Ray starts the workers as
usual.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.forks import forking_starter
from dist_aclgraph.actors.forks.fork_server import ForkAddress, ForkServer
from dist_aclgraph.actors.forks.forking_starter import ForkingStarter
from dist_aclgraph.actors.host import processes
from dist_aclgraph.config import Config, load_config
from tests.actors.leftovers import assert_processes_are_gone, wait_until

CONFIG = load_config("configs/tiny-qwen3.yaml")

# The tests run this program instead of Ray's worker. It prints its arguments and its environment.
PROGRAM = """
import json, os, sys
found = {
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "value": os.environ.get("A_VALUE"),
    "only_of_the_server": os.environ.get("PYTHONPATH"),
    "has_loaded": "torch_npu" in sys.modules,
    "is_initialized": "torch_npu" in sys.modules and sys.modules["torch_npu"].npu.is_initialized(),
    "threads": len(os.listdir("/proc/self/task")),
    "is_main": __name__ == "__main__",
    "pid": os.getpid(),
}
if found["has_loaded"]:
    from ray._raylet import Config
    found["timeout_ms"] = Config.object_timeout_milliseconds()
if "sum" in sys.argv:
    from dist_aclgraph.device import emulator
    emulator.load({})
    import torch
    found["sum"] = (torch.arange(4.0, device="npu") + 1).sum().item()
print(json.dumps(found), flush=True)
if "sleep" in sys.argv:
    import time
    time.sleep(600)
sys.exit(0)
"""


class Starter:
    """Starts programs as Ray starts its workers. ``command`` is run in place of the Python
    interpreter.
    """

    def __init__(self, command: str, folder: Path) -> None:
        self.command = command
        self.path = shlex.split(command)[-1]
        self._folder = folder
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        self._count = 0

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Path:
        """Start the program; return the file with its output."""
        self._count += 1
        out = self._folder / f"out{self._count}"
        line = f"exec {self.command} {shlex.join([str(self._program), *arguments])}"
        with out.open("wb") as file:
            subprocess.run(
                ["bash", "-c", line],
                cwd=self._folder,
                env={"PATH": os.environ["PATH"], **(environment or {})},
                stdout=file,
                check=True,
            )
        return out

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        out = self.start(*arguments, environment=environment)
        wait_until(lambda: out.read_text().endswith("}\n"), "the program has ended", 120)
        found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with closing(ForkServer(CONFIG)) as server:
        yield Starter(server.address.command, tmp_path_factory.mktemp("forks"))


def test_a_forked_program_is_what_its_client_was_started_for(forks: Starter) -> None:
    found = forks.run("--a", "b c", environment={"A_VALUE": "mine"})

    assert found["arguments"] == ["--a", "b c"]
    assert found["is_main"]
    assert found["folder"] == str(forks._folder)
    assert (found["value"], found["only_of_the_server"]) == ("mine", None)


def test_a_forked_process_has_loaded_torch_npu_but_has_no_device_and_no_other_thread(
    forks: Starter,
) -> None:
    found = forks.run()

    assert found["has_loaded"]
    assert not found["is_initialized"]
    assert found["threads"] == 1


def test_several_open_devices_of_their_own(forks: Starter) -> None:
    outs = [forks.start("sum") for _ in range(3)]
    for out in outs:
        wait_until(lambda out=out: out.read_text().endswith("}\n"), "a program has ended", 120)
    found = [json.loads(out.read_text().splitlines()[-1]) for out in outs]

    assert [one["sum"] for one in found] == [10.0] * 3
    assert len({one["pid"] for one in found}) == 3


def test_forked_processes_leave_nothing_when_they_end(forks: Starter) -> None:
    assert_processes_are_gone([forks.run()["pid"]])


# A valid request with an unknown key. The key's value is nested too deeply for any parser.
DEEP = b'\n{"arguments":[],"folder":"","environment":{},"zz":' + b"[" * 100_000


@pytest.mark.parametrize("junk", [b"", b"x", b"\n{}", b"\n" + b"[" * 1000, DEEP])
def test_an_invalid_request_does_not_stop_the_fork_server(forks: Starter, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(forks.path)
        stranger.sendall(junk)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""

    assert forks.run()["has_loaded"]


def test_without_a_server_a_program_loads_for_itself(tmp_path: Path) -> None:
    with closing(ForkServer(CONFIG)) as server:
        starter = Starter(server.address.command, tmp_path)

    found = starter.run("--a", environment={"A_VALUE": "mine"})

    assert (found["arguments"], found["value"]) == (["--a"], "mine")
    assert not found["has_loaded"]
    assert not Path(starter.path).parent.exists()


@pytest.mark.slow
def test_nothing_is_forked_from_a_process_with_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some libraries start a thread when they are imported. Then the server forks nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(ForkServer(CONFIG)) as server:
        assert not Starter(server.address.command, tmp_path).run()["has_loaded"]


@pytest.mark.slow
def test_the_server_ends_together_with_its_owner(tmp_path: Path) -> None:
    code = (
        "from dist_aclgraph.actors.forks import fork_server as f\n"
        "from dist_aclgraph.config import load_config\n"
        "import signal\n"
        "print(f.ForkServer(load_config('configs/tiny-qwen3.yaml')).address.command, flush=True)\n"
        "signal.pause()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        starter = Starter(owner.stdout.readline().strip(), tmp_path)
        assert starter.run()["has_loaded"]
        servers = processes.children(owner.pid)
        assert servers
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()

    assert_processes_are_gone(servers)


def server_of(starter: ForkingStarter) -> str:
    """Return the server's path, which is part of the starter's command."""
    command = starter.command(CONFIG)
    assert command is not None
    return shlex.split(command)[-1]


@pytest.mark.slow
def test_a_server_stays_for_later_starts_and_is_replaced_when_it_is_gone(tmp_path: Path) -> None:
    others = processes.children(os.getpid())
    with closing(ForkingStarter()) as starter:
        path = server_of(starter)
        assert Starter(starter.command(CONFIG) or "", tmp_path).run()["has_loaded"]
        assert server_of(starter) == path

        servers = processes.children(os.getpid()) - others
        processes.kill_all(servers)
        assert_processes_are_gone(servers)
        assert server_of(starter) != path
        assert not Path(path).exists()


def test_a_configuration_with_other_libraries_has_another_fork_server() -> None:
    others = processes.children(os.getpid())
    device = CONFIG.device.model_copy(update={"hccl_expansion": "AIV"})
    with closing(ForkingStarter()) as starter:
        command = starter.command(CONFIG)

        assert starter.command(CONFIG.model_copy(update={"device": device})) != command
        assert len(processes.children(os.getpid()) - others) == 1


def sent(starter: ForkingStarter) -> ForkingStarter:
    """Return a pickled copy of ``starter``, as another process would get it."""
    found = pickle.loads(pickle.dumps(starter))
    assert isinstance(found, ForkingStarter)
    return found


@pytest.mark.slow
def test_a_server_of_another_process_comes_first_and_is_left_where_it_is(tmp_path: Path) -> None:
    others = processes.children(os.getpid())
    with closing(ForkingStarter()) as owner:
        path = server_of(owner)
        [lent] = processes.children(os.getpid()) - others
        with closing(sent(owner)) as borrower:
            assert server_of(borrower) == path
            os.kill(lent, signal.SIGSTOP)
            wait_until(lambda: not processes.is_running(lent), "it does not stop")
            assert server_of(borrower) != path
            os.kill(lent, signal.SIGCONT)
            wait_until(lambda: server_of(borrower) == path, "it is not used again")
            borrower.renew()
            assert server_of(borrower) != path

        assert Starter(owner.command(CONFIG) or "", tmp_path).run()["has_loaded"]


def test_a_forked_process_leaves_the_server_to_its_parent() -> None:
    with closing(ForkingStarter()) as owner:
        path = server_of(owner)
        child = os.fork()
        if child == 0:  # the supervisor forks the owner of a deployment in the same way
            owner.disown()
            is_same = server_of(owner) == path
            owner.close()
            os._exit(0 if is_same else 1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert server_of(owner) == path
        assert Path(path).exists()


def test_where_no_server_can_be_made_each_process_loads_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(config: Config) -> ForkServer:
        raise OSError("no room")

    monkeypatch.setattr(forking_starter, "ForkServer", refuse)
    with closing(ForkingStarter()) as starter:
        assert starter.command(CONFIG) == shlex.quote(sys.executable)


def test_a_closed_starter_makes_no_server() -> None:
    starter = ForkingStarter()
    starter.close()

    assert starter.command(CONFIG) == shlex.quote(sys.executable)


@pytest.mark.slow
def test_the_server_ends_its_forked_processes_and_continues(forks: Starter, tmp_path: Path) -> None:
    with closing(ForkServer(CONFIG)) as server:
        starter = Starter(server.address.command, tmp_path)
        sleeping = starter.start("sleep")
        wait_until(lambda: sleeping.read_text() != "", "it does not sleep", 120)
        pid = json.loads(sleeping.read_text())["pid"]
        os.kill(pid, signal.SIGSTOP)

        server.address.end_forked()

        assert_processes_are_gone([pid])
        assert starter.run()["has_loaded"]


def test_of_a_process_id_that_means_another_nothing_is_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        stale = ForkAddress("gone", os.getpid(), processes.start_of(os.getpid()) - 1, {})

        stale.end_forked()

        assert child.poll() is None
        child.kill()


def test_a_process_of_another_job_of_ray_loads_for_itself(forks: Starter) -> None:
    """Ray's native library reads the job's id only when it is loaded. A fork for another job would
    have a wrong id.
    """
    assert forks.run(environment={"RAY_JOB_ID": "01000000"})["has_loaded"]
    assert not forks.run(environment={"RAY_JOB_ID": "02000000"})["has_loaded"]


def test_ray_reads_the_variables_of_the_process(forks: Starter) -> None:
    name = "RAY_object_timeout_milliseconds"
    assert forks.run(environment={name: "77"})["timeout_ms"] == 77


@pytest.mark.slow
def test_a_client_that_no_longer_waits_gets_no_forked_process(tmp_path: Path) -> None:
    with closing(ForkServer(CONFIG)) as server, (tmp_path / "late").open("wb") as late:
        starter = Starter(server.address.command, tmp_path)
        starter.run()
        os.kill(server.address.pid, signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(starter.path)
            socket.send_fds(client, [b"\n"], (late.fileno(),) * 3)
            program = [str(tmp_path / "program.py")]
            request = {"arguments": program, "folder": "/", "environment": {}}
            client.sendall(json.dumps(request).encode())
        os.kill(server.address.pid, signal.SIGCONT)

        # The server answers requests in order. A wrong start of the departed client's program would
        # come before the start of this request's program.
        starter.run()

        assert (tmp_path / "late").read_bytes() == b""


def test_a_server_whose_starter_died_while_it_loaded_leaves(tmp_path: Path) -> None:
    code = (
        "from dist_aclgraph.actors.forks import fork_server as f\n"
        "from dist_aclgraph.config import load_config\n"
        "import os\n"
        "f.ForkServer(load_config('configs/tiny-qwen3.yaml'))\n"
        "[server] = f.Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()\n"
        "print(server, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout

    assert_processes_are_gone([int(said)])
