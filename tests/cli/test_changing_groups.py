"""``dist-aclgraph scale`` and ``roll`` change another process's service while streams run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from dist_aclgraph.actors.cluster import local_ray
from dist_aclgraph.actors.deployment import running
from dist_aclgraph.actors.deployment.running import choose_deployment
from dist_aclgraph.cli.main import cli
from dist_aclgraph.errors import PlacementError
from tests.deployments import LONG_STARTS
from tests.ports import free_port
from tests.serve.conftest import CONFIG

ROOT = Path(__file__).parents[2]
WAIT_S = 480.0
PAUSE_S = 0.3  # seconds between two requests; leaves CPU time to groups that start
OVERRIDES = (
    "dtype=float32",
    "device.emulator.strict=false",
    "graph.sizes=[4,8]",
    "scheduler.max_num_seqs=8",
    "kv.num_blocks=64",
    *(f"{name}={seconds}" for name, seconds in LONG_STARTS.items()),
)
COMMAND = [sys.executable, "-m", "dist_aclgraph.cli.main"]
BODY = {
    "model": "tiny-qwen3", "prompt": [70, 71, 72], "max_tokens": 40, "temperature": 0,
    "ignore_eos": True,
}  # fmt: skip


@dataclass
class Service:
    """A service in another process. The test reads the service's addresses from the output."""

    url: str
    ray_address: str
    deployment: str

    def command(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a ``dist-aclgraph`` command with the name of this service, because other services may
        run at the same time.
        """
        return subprocess.run(
            [*COMMAND, *map(str, arguments), f"--deployment={self.deployment}",
             f"--ray={self.ray_address}"],
            cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S,
        )  # fmt: skip

    @property
    def groups(self) -> dict[str, int]:
        return dict(httpx.get(f"{self.url}/ready", timeout=WAIT_S).json()["groups"])


@pytest.fixture
def service() -> Iterator[Service]:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "serve", str(CONFIG), *OVERRIDES, f"--port={port}"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"--deployment (\S+) --ray (\S+)", line):
                break
        assert found, "".join(said)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Service(f"http://127.0.0.1:{port}", found[2], found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.cluster
def test_a_running_service_is_scaled_and_rolled_without_a_failed_request(
    service: Service, npu: object
) -> None:
    texts: list[str] = []
    stopping = threading.Event()

    def ask_again() -> None:
        with httpx.Client(base_url=service.url, timeout=WAIT_S) as http:
            while not stopping.wait(PAUSE_S):
                reply = http.post("/v1/completions", json=BODY)
                texts.append(reply.json()["choices"][0]["text"] if reply.is_success else reply.text)

    asking = [threading.Thread(target=ask_again, daemon=True) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        scaled = service.command("scale", 2)
        assert scaled.returncode == 0, scaled.stderr
        assert "Placing workers ...\n" in scaled.stderr
        assert service.groups == {"serving": 2, "draining": 0, "lost": 0, "total": 2}
        rolled = service.command("roll", CONFIG, *OVERRIDES, "kv.num_blocks=70")
        assert rolled.returncode == 0, rolled.stderr
        assert "Placing workers (group 2 of 2) ...\n" in rolled.stderr
        assert "Draining: requests that run end (group 2 of 2) ...\n" in rolled.stderr
        assert service.groups["serving"] == 2
        refused = service.command("roll", CONFIG, *OVERRIDES, "served_model_name=another")
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "name changes" in refused.stderr
        assert service.command("scale", 1).returncode == 0
        assert service.groups == {"serving": 1, "draining": 0, "lost": 0, "total": 1}
    finally:
        stopping.set()
        for thread in asking:
            thread.join(WAIT_S)
    assert len(texts) >= 3
    assert len(set(texts)) == 1


def test_of_several_rays_on_this_machine_none_is_taken_by_chance(
    monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    monkeypatch.setattr(local_ray, "find_gcs_addresses", lambda: frozenset({"h:2", "h:1"}))
    monkeypatch.setattr(local_ray, "_init", lambda address: pytest.fail(f"joins {address}"))

    with pytest.raises(PlacementError, match=r"2 Rays run on this machine: h:1, h:2; .* --ray"):
        local_ray.join_ray(None)


def test_the_ray_that_is_named_goes_before_the_environments(
    monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    joined: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    monkeypatch.setattr(local_ray, "_init", joined.append)

    local_ray.join_ray("127.0.0.1:7777")
    local_ray.join_ray(None)

    assert joined == ["127.0.0.1:7777", "10.0.0.9:6379"]


def test_no_groups_at_all_is_refused_before_a_cluster_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "joined_ray", lambda address: pytest.fail("joins"))

    refused = CliRunner().invoke(cli, ["scale", "0", "--ray", "127.0.0.1:1"])

    assert refused.exit_code == 2
    assert "at least 1" in refused.stderr and refused.stderr.count("\n") == 1


def test_the_deployment_that_is_meant_must_be_clear() -> None:
    assert choose_deployment(["controller-a"], None) == "controller-a"
    assert choose_deployment(["controller-a", "controller-b"], "controller-b") == "controller-b"
    with pytest.raises(PlacementError, match="no deployment runs"):
        choose_deployment([], None)
    with pytest.raises(PlacementError, match="2 deployments run: a, b"):
        choose_deployment(["a", "b"], None)
    with pytest.raises(PlacementError, match="'c' runs; there are: a, b"):
        choose_deployment(["a", "b"], "c")
