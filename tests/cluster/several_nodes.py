"""Starts Ray clusters of several simulated nodes on this machine, and runs programs at the head.

Ray's own test utility starts one raylet for each node. All nodes use the same kernel, but each has
its own id and loopback address. Messages between nodes use TCP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.host import processes
from dist_aclgraph.config import Config
from tests.deployments import LONG_STARTS, greedy_params
from tests.lockstep import lockstep
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
END_S = 60.0
ATTEMPTS = 3

PROMPTS = [[70, 71, 72], [80, 81], [90], [100, 101, 102, 103]]
NUM_TOKENS = 12
PORTS = free_ports(40)
OVER_NODES = {
    "parallel.tp": 2, "parallel.dp": 2, "parallel.ep": 4, "dtype": "float32",
    "speculative.num_tokens": 0, "graph.sizes": [4], "device.kind": "emulated",
    "device.emulator.strict": False, "cluster.ports": f"{PORTS[0]}-{PORTS[-1]}",
    "timeouts.link_s": 60, **LONG_STARTS,
}  # fmt: skip
APART = {**OVER_NODES, "parallel.ep": 1}
# One group computes long prompts. The other group fetches the KV of these prompts from files on the
# first group's nodes.
COPIES = {
    "kv.disk": "~/kv", "kv.disk_gib": 0.1, "kv.block_size": 16,
    "parallel.prefill_groups": 1, "parallel.prefill_from_tokens": 64,
}  # fmt: skip

# Programs that run on the head node. Their arguments are a configuration file, and changes of this
# configuration in JSON.
GENERATE = """
import dataclasses, json, sys
from dist_aclgraph.actors.deployment.llm import LLM
from tests.deployments import greedy_params

def say(value):
    print("ready", json.dumps(value, default=bytes.decode), flush=True)

with LLM(sys.argv[1], json.loads(sys.argv[2])) as llm:
    ranks, reach = llm.report()["ranks"], llm._deployment.reach()
    seen = [address.seen_from(reach.node_id) for address in reach.addresses]
    say([ranks, [dataclasses.asdict(endpoint) for endpoint in seen]])
    for line in sys.stdin:
        prompts, count = json.loads(line)
        answers = llm.generate(prompts, greedy_params(count))
        tokens = [answer.outputs[0].token_ids for answer in answers]
        (found,) = llm._client.query("metrics").values()
        say([tokens, found["resumptions"]])
"""
SERVE = """
import json, sys
from dist_aclgraph.actors.deployment.llm import start_on_ray
from dist_aclgraph.cli.serve import serve_until_signal
from dist_aclgraph.config import load_config

def start(config, on_progress=None, **options):
    deployment = start_on_ray(config)
    report = deployment.report()
    groups = [report, *report["groups"]]
    nodes = [[rank["node"] for rank in group["ranks"]] for group in groups]
    print("ready", json.dumps(nodes), flush=True)
    return deployment

serve_until_signal(load_config(sys.argv[1], json.loads(sys.argv[2])), start)
"""

# On a busy machine, the agents of a node need longer to start than Ray's limit of 15 s.
RAY_SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_agent_register_timeout_ms": "300000"}
_CLUSTER = """
import json, os, sys, time
from ray.cluster_utils import Cluster
from dist_aclgraph.actors.host import processes

cluster = Cluster()
wanted = json.loads(sys.argv[1])
for number, options in enumerate(wanted, 2):
    # No test needs these processes, which read logs all the time, and start machines.
    more = {"include_log_monitor": False, "no_monitor": True}
    if cluster.head_node is None:
        more["include_dashboard"] = False
    try:
        cluster.add_node(node_ip_address=f"127.0.0.{number}", num_cpus=4, **options, **more)
    except Exception as e:  # Ray gives up after half a minute, but the node can still come up later
        if cluster.head_node is None:
            raise
        print(e, flush=True)
until_s = time.monotonic() + 300
raylets = [pid for pid in processes.children(os.getpid()) if processes.name_of(pid) == "raylet"]
while sum(node["Alive"] for node in cluster.global_state.node_table()) < len(wanted):
    assert len(processes.living().intersection(raylets)) == len(wanted), "a node has died"
    assert time.monotonic() < until_s, "nodes did not come up"
    time.sleep(0.5)
print("ready", json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


class Program:
    """A Python program that prints answers as ``ready {json}``, and ends when its input ends.

    Args:
        popen: function that starts the program, on this machine or on a simulated node.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
        **variables: str,
    ) -> None:
        self._process = popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **RAY_SETTINGS, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> Any:
        """Return the JSON value of the program's next answer."""
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if line.startswith("ready "):
                return json.loads(line.removeprefix("ready "))
        raise AssertionError("".join(lines))

    def write(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End the program's input, so that the program ends. After a time limit, kill the program
        and the processes that it started.
        """
        started = _descendants(self.pid)
        try:
            self._process.communicate(timeout=END_S)
        finally:
            processes.kill_all(started | _descendants(self.pid) | {self.pid})
            self._process.wait()


def _start(options: list[dict[str, Any]], attempts: int = ATTEMPTS) -> tuple[Program, Any]:
    """Start a cluster; try again if the head was not ready within Ray's limit of 30 s."""
    program = Program(_CLUSTER, json.dumps(options))
    try:
        return program, program.read()
    except BaseException as e:
        program.end()
        if attempts == 1 or not isinstance(e, AssertionError):
            raise
    return _start(options, attempts - 1)


class Nodes:
    """A Ray cluster. This object owns the cluster's processes.

    Attributes:
        address: the address at which programs join the cluster.
    """

    def __init__(self, options: list[dict[str, Any]]) -> None:
        self._program, said = _start(options)
        self.address: str = said["address"]
        self._raylets: list[int] = said["raylets"]

    @property
    def actors(self) -> set[int]:
        """Processes that the cluster's raylets have started."""
        found = [processes.with_variable("RAY_RAYLET_PID", str(pid)) for pid in self._raylets]
        return set().union(*found)

    def kill(self, node_ip: str) -> None:
        """Let a node die: kill its raylet. The processes that this raylet has started then end."""
        self.signal(node_ip, signal.SIGKILL)

    def signal(self, node_ip: str, number: signal.Signals) -> None:
        [pid] = [
            pid
            for pid in self._raylets
            if f"--node_ip_address={node_ip}" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(pid, number)

    @contextmanager
    def run(self, code: str, *arguments: object) -> Iterator[Program]:
        """Run the program ``code`` on the head node."""
        program = Program(code, *arguments, RAY_ADDRESS=self.address)
        try:
            yield program
        finally:
            program.end()

    def end(self) -> None:
        self._program.end()


def _descendants(pid: int) -> set[int]:
    found = processes.children(pid)
    return found.union(*(_descendants(child) for child in found))


def on_one_node(config: Config, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the tokens that the ranks of ``config`` generate on one node, without Ray."""
    with lockstep(config) as group:
        return [answer.tokens for answer in group.generate(prompts, greedy_params(count))]
