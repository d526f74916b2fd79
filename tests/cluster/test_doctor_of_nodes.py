"""``dist-aclgraph doctor --cluster`` checks all simulated nodes, even if one of them stops
answering.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.several_nodes import Nodes
from tests.ports import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HEAD, LEFT, RIGHT = "127.0.0.2", "127.0.0.3", "127.0.0.4"
DOCTOR = """
import contextlib, io, json, sys
from typer.testing import CliRunner
from dist_aclgraph.cli.doctor import cluster
from dist_aclgraph.cli.main import cli

cluster.TIMEOUT_S = float(sys.argv[1])
for _ in range(int(sys.argv[2])):
    said = CliRunner().invoke(cli, ["doctor", "--cluster", "--json", *sys.argv[3:]])
    print("ready", json.dumps([said.exit_code, json.loads(said.stdout)]), flush=True)
"""
PORTS = free_ports(11)
SPAN = f"{PORTS[0]}-{PORTS[-1]}"
CONFIG = ("configs/tiny-qwen3.yaml", f"cluster.ports={SPAN}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes([{}, {"resources": {"NPU": 2}}, {"resources": {"NPU": 2}}])
    yield made
    made.end()


def ask(nodes: Nodes, timeout_s: float, *arguments: str) -> tuple[int, dict[str, Any]]:
    with nodes.run(DOCTOR, timeout_s, 1, *arguments) as program:
        code, findings = program.read()
    return code, {finding["name"]: finding for finding in findings}


def test_nodes_that_fit_together_are_ok(nodes: Nodes) -> None:
    code, found = ask(nodes, 120, *CONFIG)

    assert code == 0, found
    assert found["links"]["found"].startswith("each of 3 nodes reaches all others by TCP")
    assert found["dist_aclgraph"]["found"].endswith(" on all of 3 nodes")
    ports = [name for name in found if name.startswith(f"ports {SPAN} of ")]
    assert len(ports) == 3
    assert {found[name]["found"] for name in ports} == {"11 free"}


def test_a_node_that_does_not_answer_is_a_line_and_the_others_are_checked(nodes: Nodes) -> None:
    nodes.signal(RIGHT, signal.SIGSTOP)
    try:
        code, found = ask(nodes, 15)
    finally:
        nodes.signal(RIGHT, signal.SIGCONT)

    assert code == 1
    [silent] = [name for name in found if name.startswith(f"node {RIGHT}/")]
    assert found[silent]["found"] == "it has not answered for 15 s"
    assert found["links"]["found"].startswith("each of 2 nodes reaches all others by TCP")
