"""A Ray cluster that the driver starts accepts only peers with its token, and notices dead
processes.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import worker as ray_worker
from ray._private.worker import print_to_stdstream
from ray.exceptions import AuthenticationError, RpcError

from dist_aclgraph.actors.cluster import local_ray
from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.run_directory import PREFIX
from dist_aclgraph.errors import PlacementError
from tests.actors.leftovers import assert_processes_are_gone
from tests.actors.listening import listening
from tests.slow import rare, slow

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
WAIT_S = 180.0

START_RAY = """
import sys, ray
from dist_aclgraph.actors.cluster.local_ray import start_ray
from dist_aclgraph.config import make_config

local = start_ray(make_config({"model": "unused", "device": {"kind": "emulated"}}))

@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return 3

actor = Actor.remote()
assert ray.get(actor.answer.remote()) == 3
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
local.stop()
"""

STRANGER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
def run(path):
    open(path, "w").close()

ray.get(run.remote(sys.argv[2]), timeout=60)
"""

GENERATE = """
import sys
from dist_aclgraph.actors.deployment.llm import LLM
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.sampling import SamplingParams
from tests.deployments import make_deployment_config

config = make_deployment_config(sys.argv[1], graph={"mode": "NONE"}, max_model_len=480)
try:
    with LLM(config) as llm:
        pids = [rank["pid"] for rank in llm.report()["ranks"]]
        print("address", *pids, flush=True)
        while True:
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=400, ignore_eos=True))
except DistAclGraphError as e:
    print("error:", e, flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_LOG_TO_STDERR": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@contextmanager
def running(script: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run ``script`` as a driver. Yield the driver's process, and the addresses that the script has
    printed. At the end, kill all descendants of the driver.
    """
    driver = start(script, *arguments)
    try:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("address"):
                yield driver, line.split()[1:]
                break
        else:
            raise AssertionError("the driver did not come up")
    finally:
        processes.kill_all(descendants(driver.pid) | {driver.pid})
        driver.wait()


def descendants(pid: int) -> set[int]:
    found = processes.children(pid)
    return found.union(*(descendants(child) for child in found))


@pytest.mark.slow
def test_a_ray_that_we_start_listens_on_loopback_and_wants_a_token(tmp_path: Path) -> None:
    with running(START_RAY) as (driver, [address]):
        sockets = listening(descendants(driver.pid) | {driver.pid})
        # The control store, the node manager, two agents, the driver and the actor listen.
        assert len(sockets) >= 5
        assert {host for host, _ in sockets} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

        port = int(address.rpartition(":")[2])
        assert ("::ffff:127.0.0.1", port) in sockets or ("127.0.0.1", port) in sockets
        for host in own_addresses():
            with pytest.raises(OSError), socket.create_connection((host, port), 5):
                pass

        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        friend = knock(port, tmp_path / "friend", {**loopback, "RAY_AUTH_MODE": "token"})
        began_s = time.monotonic()
        strangers = [
            knock(port, tmp_path / "s1", {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}),
            knock(port, tmp_path / "s2", {"HOME": str(tmp_path), **loopback}),
        ]
        assert friend.wait(100) == 0
        needed_s = time.monotonic() - began_s
        for stranger in strangers:  # each stranger has twice the time that the peer needed
            with suppress(subprocess.TimeoutExpired):
                left_s = began_s + 2 * needed_s - time.monotonic()
                assert stranger.wait(max(0.0, left_s)) != 0
            stranger.kill()
            stranger.wait()

        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["friend"]


PROTECT = """
import os
from dist_aclgraph.actors.cluster.local_ray import protect_token
os.umask(0o022)
protect_token()
"""


@pytest.mark.parametrize("given", [None, 0o644])
def test_only_this_user_can_read_the_token_of_ray(tmp_path: Path, given: int | None) -> None:
    token = tmp_path / ".ray" / "auth_token"
    if given is not None:
        token.parent.mkdir()
        token.write_text("a" * 32)
        token.chmod(given)
    known = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}

    subprocess.run(
        [sys.executable, "-c", PROTECT], check=True, env={**known, "HOME": str(tmp_path)}
    )

    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) >= 32


def knock(port: int, done: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that tries to run code on the Ray at ``port``; the code would create the file
    ``done``.
    """
    known = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", STRANGER, f"127.0.0.1:{port}", str(done)],
        env={**known, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def own_addresses() -> set[str]:
    """Return this machine's addresses, except loopback addresses; the list can be empty."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends no packet
        except OSError:
            return set()
        return {probe.getsockname()[0]} - {"127.0.0.1"}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for drivers' temporary files. The folder's name is short, because Ray creates
    sockets in it, and a socket's path must not be long.
    """
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("victim", [rare("raylet"), slow("gcs_server")])
def test_a_daemon_that_dies_ends_everything_with_one_sentence(
    checkpoint: Path, victim: str, temporary: Path
) -> None:
    with running(GENERATE, checkpoint) as (driver, _):
        pids = descendants(driver.pid)
        [pid] = [pid for pid in pids if processes.name_of(pid) == victim]

        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()

        assert driver.stdout is not None
        said = [line for line in driver.stdout if line.startswith("error:")]
        assert said, "the driver ended without a word"
        driver.wait(WAIT_S)
        assert_processes_are_gone(pids)
        assert list(temporary.glob(f"{PREFIX}*")) == []
        print(f"{victim}: {time.monotonic() - began_s:.1f} s to the end of all; {said}")


@pytest.mark.parametrize("how", ["--ray", "RAY_ADDRESS"])
def test_where_no_ray_listens_is_said_in_one_sentence(how: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens at this port
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environment = {name: v for name, v in os.environ.items() if name != "RAY_ADDRESS"}

        done = subprocess.run(
            [sys.executable, "-m", "dist_aclgraph.cli.main", "scale", "2"]
            + ([how, address] if how == "--ray" else []),
            cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S,
            env=environment | ({} if how == "--ray" else {how: address}),
        )  # fmt: skip

    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{address}: no Ray cluster answers there" in done.stderr


def test_a_ray_that_wants_a_token_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise AuthenticationError("InvalidAuthToken")

    monkeypatch.setattr(local_ray, "GcsClient", refuse)
    said = pytest.raises(PlacementError, match="wants a token: set RAY_AUTH_MODE=token")
    with socket.create_server(("127.0.0.1", 0)) as server, said:
        local_ray.join_ray(f"127.0.0.1:{server.getsockname()[1]}")


def test_ray_prints_nothing_on_stdout_while_it_is_joined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"lines": ["A worker died"], "pid": "raylet", "is_err": False, "ip": "127.0.0.1"}
    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda *_, **__: None)
    # Other tests of this process may have joined a cluster.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_worker, "_worker_logs_enabled", True)

    with local_ray.joined_ray("auto"):
        print_to_stdstream(said, ignore_prefix=False)
    assert capsys.readouterr().out == ""

    print_to_stdstream({**said, "lines": ["Another one died"]}, ignore_prefix=False)
    assert "Another one died" in capsys.readouterr().out


def test_a_ray_that_was_too_slow_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, shut_down = ["timed out during startup", "timed out during startup", ""], []

    def start(address: str, **options: object) -> None:
        if error := found.pop(0):
            raise RuntimeError(f"The current node {error}. This could happen because")

    monkeypatch.setattr(local_ray, "_init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: shut_down.append(True))

    local_ray.start_daemons(num_cpus=1)

    assert (len(shut_down), found) == (2, [])
    found.append("is out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        local_ray.start_daemons(num_cpus=1)


class SilentStore:
    """A control store of Ray that answers nothing. Each question fails after six seconds on the
    clock of this object.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def check_alive(self, node_ids: list[object], timeout: float) -> list[bool]:
        self.now_s += 6.0
        raise RpcError("deadline exceeded")

    def clock(self) -> float:
        return self.now_s

    def look_until_s(self, connected: local_ray.ConnectedRay, until_s: float) -> float:
        """Check Ray until it counts as dead, or until ``until_s``; return the time."""
        while self.now_s < until_s and not connected.death:
            connected.look()
        return self.now_s


@pytest.fixture
def silent_store(monkeypatch: pytest.MonkeyPatch) -> SilentStore:
    store = SilentStore()
    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_worker, "global_worker", SimpleNamespace(gcs_client=store))
    return store


def test_a_control_store_that_hangs_in_a_local_ray_is_found_soon(silent_store: SilentStore) -> None:
    connected = local_ray.ConnectedRay(local_ray.LOCAL_SILENT_S, {}, silent_store.clock)

    assert silent_store.look_until_s(connected, 300.0) <= 36.0
    assert "has not answered for 30 s" in connected.death


@pytest.mark.parametrize(("raylet", "found_s"), [(17, None), (None, 330.0)])
def test_an_absent_control_store_of_a_cluster_ends_nothing_while_the_raylet_waits(
    silent_store: SilentStore, raylet: int | None, found_s: float | None
) -> None:
    connected = local_ray.joined(raylet, 300.0, silent_store.clock)

    ended_s = silent_store.look_until_s(connected, 3000.0)

    assert bool(connected.death) == (found_s is not None)
    assert found_s is None or found_s < ended_s <= found_s + 6.0


LAST_OF_ITS_GROUP = """
import os, time
from dist_aclgraph.actors.cluster.local_ray import own_process_group

leader = os.fork()
if leader == 0:
    os.setpgid(0, 0)
    member = os.fork()
    if member:
        os._exit(0)
    while os.getppid() == os.getpgrp():
        time.sleep(0.01)
    with own_process_group():
        assert os.getpgrp() == os.getpid()
    print("goes on", flush=True)
    os._exit(0)
os.waitpid(leader, 0)
"""


def test_the_last_process_of_a_group_may_start_ray() -> None:
    """When a script has ended, a background process of the script can be the last process of the
    process group.
    """
    ended = subprocess.run(
        [sys.executable, "-c", LAST_OF_ITS_GROUP], capture_output=True, text=True, timeout=WAIT_S
    )

    assert (ended.stdout, ended.stderr) == ("goes on\n", "")
