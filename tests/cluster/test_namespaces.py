"""The scripts of cluster/ start Ray on three hosts, which share only a network.

The head has no NPUs; clients run on the head. Ranks on different hosts communicate over the
emulator's sockets.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.cluster.several_nodes import (
    APART,
    GENERATE,
    NUM_TOKENS,
    OVER_NODES,
    PORTS,
    PROMPTS,
    ROOT,
    SERVE,
    Program,
    on_one_node,
)
from tools.namespaces import Node, nodes, why_no_nodes

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

PORT = 8123
START_S = 240.0
PRIVATE = "/mnt"  # Ray uses the head's file names on all nodes
LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp
CLIENT = """
import json, sys
import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", timeout=300, max_retries=20)
for line in sys.stdin:
    prompts, count = json.loads(line)
    answers = [
        client.completions.create(
            model="tiny-qwen3", prompt=prompt, max_tokens=count, temperature=0,
            extra_body={"ignore_eos": True},
        )
        for prompt in prompts
    ]
    print("ready", json.dumps([answer.choices[0].text for answer in answers]), flush=True)
"""


class Hosts:
    """A Ray cluster of three hosts."""

    def __init__(self, made: list[Node], logs: Path) -> None:
        self.head, *self.others = made
        self._count = 0
        self._logs = logs
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": PRIVATE,
        }

    def start(self, node: Node, script: str, *arguments: str, **variables: str) -> None:
        """Start Ray on a node, and wait until the head knows the node.

        Ray allows a node 30 seconds for its start. If a busy machine needs longer, the start is
        tried again.
        """
        self._count += 1
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            process = self._try_start(node, script, *arguments, **variables)
            while process.poll() is None and time.monotonic() < until_s:
                if self._num_up() == self._count:
                    return
        raise AssertionError("\n".join(log.read_text() for log in self._logs.iterdir()))

    def _try_start(
        self, node: Node, script: str, *arguments: str, **variables: str
    ) -> subprocess.Popen[str]:
        with (self._logs / f"{node.address}.log").open("w") as log:
            return node.start(
                [str(ROOT / "cluster" / script), *arguments, "--block", "--num-cpus=4",
                 f"--node-ip-address={node.address}"],
                env={**self._environment, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _num_up(self) -> int:
        code = "import ray; ray.init(); print('up', sum(n['Alive'] for n in ray.nodes()))"
        asked = self.popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        said, _ = asked.communicate(timeout=START_S)
        found = re.search(r"^up (\d+)$", said, re.MULTILINE)  # Ray prints other lines, too
        return int(found[1]) if found else 0

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program at the head."""
        options.pop("cwd", None)
        env = {**options.pop("env", {}), **self._environment, "RAY_ADDRESS": "auto"}
        return self.head.start(command, env={**env, "RAY_AUTH_MODE": "token"}, **options)

    @contextmanager
    def run(self, code: str, *arguments: object) -> Iterator[Program]:
        program = Program(code, *arguments, popen=self.popen)
        try:
            yield program
        finally:
            program.end()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ExitStack() as stack:
        private = stack.enter_context(nodes(3, private=("/dev/shm", PRIVATE)))
        made = Hosts(private, tmp_path_factory.mktemp("logs"))
        made.start(made.head, "start-head.sh", "--include-dashboard=false")
        for node in made.others:
            made.start(node, "start-worker.sh", made.head.address, EMULATED_NPUS="2")
        yield made


def listening(node: Node) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes of a node listen."""
    lines = node.run(["cat", "/proc/net/tcp"], 30).stdout.splitlines()[1:]
    found = set()
    for fields in map(str.split, lines):
        host, port = fields[1].split(":")
        if fields[3] == LISTEN:
            found.add((".".join(str(b) for b in bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_a_group_over_two_hosts_gives_the_tokens_of_one(hosts: Hosts) -> None:
    config = load_config("configs/tiny-deepseek.yaml", OVER_NODES)

    with hosts.run(GENERATE, "configs/tiny-deepseek.yaml", json.dumps(OVER_NODES)) as program:
        ranks, addresses = program.read()
        program.write([PROMPTS, NUM_TOKENS])
        tokens, resumptions = program.read()
        found = {node.address: listening(node) for node in hosts.others}

    left, right = (node.address for node in hosts.others)
    assert sorted((rank["node"], *rank["npu_ids"]) for rank in ranks) == [
        (left, 0), (left, 1), (right, 0), (right, 1),
    ]  # fmt: skip
    assert tokens == on_one_node(config, PROMPTS, NUM_TOKENS)
    assert resumptions == {}
    leader = ranks[0]["node"]
    assert [address["url"].startswith(f"tcp://{leader}:") for address in addresses] == [True]
    for address, places in found.items():
        ours = {host for host, port in places if port in PORTS}
        assert ours == ({leader} if address == leader else set())


def test_a_group_over_two_hosts_comes_back_from_a_link_that_failed(
    hosts: Hosts, tmp_path: Path
) -> None:
    arms = tmp_path / "arms"  # all hosts share this file
    settings = {**OVER_NODES, "device.emulator.fault.file": str(arms), "recovery.resume_s": 60}
    config = load_config("configs/tiny-deepseek.yaml", OVER_NODES)

    with hosts.run(GENERATE, "configs/tiny-deepseek.yaml", json.dumps(settings)) as program:
        program.read()
        arms.write_text("fault_op=HcclAllReduce fault_kind=link")
        program.write([PROMPTS, NUM_TOKENS])
        tokens, resumptions = program.read()

    assert not arms.exists(), "nobody was struck"
    assert resumptions == {"link": 1}
    assert tokens == on_one_node(config, PROMPTS, NUM_TOKENS)


def test_groups_on_a_host_each_answer_the_openai_client_at_the_head(hosts: Hosts) -> None:
    settings = json.dumps({**APART, "serve.port": PORT})

    with hosts.run(SERVE, "configs/tiny-qwen3.yaml", settings) as service:
        where = service.read()
        try:
            with hosts.run(CLIENT, f"http://127.0.0.1:{PORT}/v1") as client:
                client.write([PROMPTS, NUM_TOKENS])
                texts = client.read()
        finally:
            os.killpg(service.pid, signal.SIGTERM)

    assert sorted(where) == [[node.address] * 2 for node in hosts.others]
    config = load_config("configs/tiny-qwen3.yaml", {**APART, "parallel.dp": 1})
    decode = partial(Tokenizer.decode, Tokenizer(config.model))
    assert texts == [decode(tokens) for tokens in on_one_node(config, PROMPTS, NUM_TOKENS)]
