"""Hosts, links and the head fail while streams run, and later come back.

The hosts share only a network. On each host, a shell script restarts Ray when Ray ends. On real
hosts, systemd does this with the units in cluster/systemd. Each test prints what its client has
counted; pytest's option -s shows this output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.actors import leftovers
from tests.cluster.several_nodes import ROOT
from tools.chaos.hosts import Hosts
from tools.chaos.hosts import hosts as make_hosts
from tools.namespaces import why_no_nodes

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
    pytest.mark.timeout(1200),
]

PORT, SERVE_PORT = 8124, 8000
PROGRAM, SERVE = (str(Path(sys.executable).with_name(n)) for n in ("dist-aclgraph", "serve"))
WAIT_S = 400.0
wait_until = partial(leftovers.wait_until, timeout_s=WAIT_S)
SETTINGS = {
    "parallel.tp": 1, "parallel.dp": 2, "dtype": "float32", "device.kind": "emulated",
    "device.emulator.strict": "false", "graph.sizes": "[8,32]", "scheduler.max_num_seqs": 32,
    "cluster.ports": "23400-23440", "serve.port": PORT, "timeouts.place_s": 120,
    "recovery.restarts_per_hour": 100,
}  # fmt: skip
# The ranks of one group are spread over both hosts.
SPANNING = SETTINGS | {"parallel.tp": 2, "parallel.ep": 4, "speculative.num_tokens": 0}
CONFIGS = {"tiny-qwen3": SETTINGS, "tiny-deepseek": SPANNING}
# This program requests the same streams again and again until its standard input ends. It does not
# retry a request that fails.
CLIENT = """
import json, sys, threading, time
import httpx

url, num_streams, num_tokens, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
is_over, lock = threading.Event(), threading.Lock()
found = {"ok": 0, "differ": 0, "failed": [], "gap_s": 0.0}
wanted = {}

def stream(index):
    body = {"model": model, "prompt": [70 + index % 8, 71, 72], "max_tokens": num_tokens,
            "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.Client(timeout=httpx.Timeout(600.0)) as client:
        while not is_over.is_set():
            text, error, last_s, gap_s = "", "", time.monotonic(), 0.0
            try:
                with client.stream("POST", url + "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        error = f"{answer.status_code} {answer.read().decode()}"
                    for line in answer.iter_lines():
                        gap_s = max(gap_s, time.monotonic() - last_s)
                        last_s = time.monotonic()
                        if line.startswith("data: {"):
                            event = json.loads(line[6:])
                            if "error" in event:
                                error = str(event["error"])
                            else:
                                text += event["choices"][0]["text"]
            except httpx.HTTPError as e:
                error = repr(e)
            with lock:
                found["gap_s"] = max(found["gap_s"], gap_s)
                if error:
                    found["failed"].append(error)
                elif wanted.setdefault(index % 8, text) == text:
                    found["ok"] += 1
                else:
                    found["differ"] += 1

threads = [threading.Thread(target=stream, args=(i,)) for i in range(num_streams)]
for thread in threads:
    thread.start()
for line in sys.stdin:
    with lock:
        print(json.dumps(found), flush=True)
is_over.set()
for thread in threads:
    thread.join()
print(json.dumps(found), flush=True)
"""
READY = """
import sys, httpx
try:
    print(httpx.get(sys.argv[1] + "/ready", timeout=10).status_code)
except httpx.HTTPError as e:
    print(repr(e))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with make_hosts(2, npus=2) as made:
        yield made


class Load:
    """Streams of a client that runs on the head."""

    def __init__(
        self,
        hosts: Hosts,
        num_streams: int,
        num_tokens: int,
        *,
        port: int = PORT,
        model: str = "tiny-qwen3",
    ) -> None:
        url = f"http://127.0.0.1:{port}"
        self._process = hosts.popen(
            [sys.executable, "-c", CLIENT, url, str(num_streams), str(num_tokens), model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def so_far(self) -> dict[str, Any]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def wait_for_more(self, count: int) -> None:
        """Wait until ``count`` more streams have ended."""
        seen = self.so_far()["ok"]
        wait_until(lambda: self.so_far()["ok"] >= seen + count, "no stream ends")

    def end(self) -> dict[str, Any]:
        self._process.stdin.close()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        self._process.wait(WAIT_S)
        return found


@contextmanager
def serving(
    hosts: Hosts, tmp_path: Path, *, port: int = PORT, model: str = "tiny-qwen3"
) -> Iterator[Any]:
    """Run the service on the head; yield a function that returns the status code of /ready, or the
    error.

    Args:
        port: PORT starts ``dist-aclgraph serve``; SERVE_PORT starts Ray Serve.
    """
    settings = [f"{key}={value}" for key, value in CONFIGS[model].items()]
    log = (tmp_path / "service.log").open("w")
    command = [PROGRAM, "serve", f"configs/{model}.yaml", *settings]
    if port == SERVE_PORT:
        command = [SERVE, "run", "dist_aclgraph:app", f"config=configs/{model}.yaml", *settings]
    service = hosts.popen(command, stdout=log, stderr=subprocess.STDOUT)

    def status() -> str:
        command = [sys.executable, "-c", READY, f"http://127.0.0.1:{port}"]
        return hosts.head.run(command, 60).stdout.strip()

    def is_ready() -> bool:
        assert service.poll() is None, (tmp_path / "service.log").read_text()
        return status() == "200"

    try:
        wait_until(is_ready, "the service does not start")
        yield status
    finally:
        os.killpg(service.pid, signal.SIGTERM)
        # SIGTERM ends the program nsenter at once, but the service first drains its requests, and
        # then frees its port.
        wait_until(lambda: status().startswith("ConnectError"), "the service does not stop")
        print((tmp_path / "service.log").read_text()[-3000:])


@pytest.mark.parametrize("model", CONFIGS)
def test_a_link_that_is_down_for_a_minute_costs_time_and_no_request(
    hosts: Hosts, tmp_path: Path, model: str
) -> None:
    cut = hosts.others[1]
    with serving(hosts, tmp_path, model=model) as status:
        load = Load(hosts, 32, 200, model=model)
        load.wait_for_more(32)
        cut.set_link(False)
        time.sleep(60)  # the duration of the outage
        cut.set_link(True)
        wait_until(lambda: hosts.num_alive() == 3, "the host does not come back")
        wait_until(lambda: status() == "200", "the service does not come back")
        load.wait_for_more(32)
        found = load.end()

    print("link down:", model, found)
    assert (found["failed"], found["differ"]) == ([], 0)


@pytest.mark.parametrize("model", CONFIGS)
def test_a_host_that_fails_and_comes_back_ends_no_request(
    hosts: Hosts, tmp_path: Path, model: str
) -> None:
    failed = hosts.others[1]
    with serving(hosts, tmp_path, model=model) as status:
        load = Load(hosts, 32, 200, model=model)
        load.wait_for_more(32)
        hosts.fail(failed)
        wait_until(lambda: hosts.num_alive() == 2, "the loss of the host is not noticed")
        hosts.come_back(failed)
        wait_until(lambda: hosts.num_alive() == 3, "the host does not come back")
        back_s = time.monotonic()
        wait_until(lambda: status() == "200", "the service does not come back")
        print(f"serving {time.monotonic() - back_s:.0f} s after the host is back")
        load.wait_for_more(32)
        found = load.end()

    print("host failed:", model, found)
    assert (found["failed"], found["differ"]) == ([], 0)


def test_a_control_store_that_dies_ends_no_request(hosts: Hosts, tmp_path: Path) -> None:
    with serving(hosts, tmp_path) as status:
        load = Load(hosts, 8, 200)
        load.wait_for_more(8)

        hosts.kill(hosts.head, "gcs_server")

        wait_until(lambda: hosts.num_alive() == 3, "the head does not come back")
        wait_until(lambda: status() == "200", "the service does not come back")
        load.wait_for_more(8)
        found = load.end()

    print("control store killed:", found)
    assert (found["failed"], found["differ"]) == ([], 0)


def test_a_node_manager_that_hangs_is_found(hosts: Hosts, tmp_path: Path) -> None:
    struck = hosts.others[0]
    with serving(hosts, tmp_path) as status:
        load = Load(hosts, 8, 200)
        load.wait_for_more(8)

        hosts.kill(struck, "raylet/raylet", signal.SIGSTOP)

        wait_until(lambda: hosts.num_alive() == 2, "the hang is not noticed")
        hosts.kill(struck, "raylet/raylet", signal.SIGCONT)
        wait_until(lambda: hosts.num_alive() == 3, "the host does not come back")
        wait_until(lambda: status() == "200", "the service does not come back")
        load.wait_for_more(8)
        found = load.end()

    print("node manager stopped:", found)
    assert (found["failed"], found["differ"]) == ([], 0)


@pytest.mark.parametrize("port", [PORT, SERVE_PORT], ids=["dist-aclgraph", "ray serve"])
def test_a_host_that_is_drained_ends_no_request(hosts: Hosts, tmp_path: Path, port: int) -> None:
    """The test drains the host as ``kubectl drain`` does: it runs the preStop hook, sends SIGTERM,
    and after a grace period SIGKILL.
    """
    drained = hosts.others[0]
    with serving(hosts, tmp_path, port=port) as status:
        load = Load(hosts, 32, 200, port=port)
        load.wait_for_more(32)

        hook = hosts.popen(
            ["bash", str(ROOT / "cluster" / "drain.sh")], drained, env={"DRAIN_S": "60"}
        )
        hook.wait(WAIT_S)
        hosts.kill(drained, "start --address", signal.SIGTERM)

        wait_until(lambda: hosts.num_alive() == 3, "the host does not come back")
        wait_until(lambda: status() == "200", "the service does not come back")
        load.wait_for_more(32)
        found = load.end()

    print("host drained:", port, found)
    assert (found["failed"], found["differ"]) == ([], 0)


def test_scaling_and_rolling_end_no_request(hosts: Hosts, tmp_path: Path) -> None:
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    other = [*settings, "graph.sizes=[4,16,32]", "scheduler.max_num_batched_tokens=256"]

    with serving(hosts, tmp_path) as status:
        load = Load(hosts, 16, 200)
        for command in (
            ["scale", "3"],
            ["scale", "2"],
            ["roll", "configs/tiny-qwen3.yaml", *other],
        ):
            begun_s = time.monotonic()
            done = hosts.popen([PROGRAM, *command], stdout=subprocess.PIPE)
            said, _ = done.communicate(timeout=WAIT_S)
            print(f"{' '.join(command[:2])}: {time.monotonic() - begun_s:.0f} s, {said.strip()}")
            assert done.returncode == 0 and status() == "200"
            load.wait_for_more(16)
        found = load.end()

    print("scaled and rolled:", found)
    assert (found["failed"], found["differ"]) == ([], 0)
