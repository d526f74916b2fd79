"""The scripts in cluster/ start Ray on three simulated hosts, which share only a network.

The head has no NPUs, and clients run there. Ranks on different hosts exchange data over sockets of
the emulator.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.actors.leftovers import wait_until
from tests.cluster.several_nodes import (
    APART,
    GENERATE,
    NUM_TOKENS,
    OVER_NODES,
    PORTS,
    PROMPTS,
    SERVE,
    Program,
    on_one_node,
)
from tools.chaos.hosts import Hosts
from tools.chaos.hosts import hosts as make_hosts
from tools.namespaces import Node, why_no_nodes

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

PORT = 8123
LISTEN = "0A"  # code of the state "listening" in /proc/net/tcp
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


@contextmanager
def at_head(hosts: Hosts, code: str, *arguments: object) -> Iterator[Program]:
    program = Program(code, *arguments, popen=hosts.popen)
    try:
        yield program
    finally:
        program.end()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with make_hosts(2, npus=2) as made:
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

    with at_head(hosts, GENERATE, "configs/tiny-deepseek.yaml", json.dumps(OVER_NODES)) as program:
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


def test_a_group_over_two_hosts_deletes_the_copies_in_the_memory_of_both(hosts: Hosts) -> None:
    settings = {**OVER_NODES, "kv.host_gib": 0.1, "kv.block_size": 16}
    prompts = [[first, *range(3, 40)] for first in range(4)]

    with at_head(hosts, GENERATE, "configs/tiny-deepseek.yaml", json.dumps(settings)) as program:
        program.read()
        program.write([prompts, NUM_TOKENS])
        program.read()
        wait_until(lambda: all(map(copies_of, hosts.others)), "a host has no copies")

    assert [copies_of(node) for node in hosts.others] == [[], []]


def copies_of(node: Node) -> list[Path]:
    """Return the folders in which the host ``node`` keeps copies of KV in memory."""
    return list((node.files / "dev/shm").glob("dist-aclgraph-kv-*/*/*/"))


def test_a_group_over_two_hosts_comes_back_from_a_link_that_failed(
    hosts: Hosts, tmp_path: Path
) -> None:
    arms = tmp_path / "arms"  # all hosts share this file
    settings = {**OVER_NODES, "device.emulator.fault.file": str(arms), "recovery.resume_s": 60}
    config = load_config("configs/tiny-deepseek.yaml", OVER_NODES)

    with at_head(hosts, GENERATE, "configs/tiny-deepseek.yaml", json.dumps(settings)) as program:
        program.read()
        arms.write_text("fault_op=HcclAllReduce fault_kind=link")
        program.write([PROMPTS, NUM_TOKENS])
        tokens, resumptions = program.read()

    assert not arms.exists(), "nobody was struck"
    assert resumptions == {"link": 1}
    assert tokens == on_one_node(config, PROMPTS, NUM_TOKENS)


def test_groups_on_a_host_each_answer_the_openai_client_at_the_head(hosts: Hosts) -> None:
    settings = json.dumps({**APART, "serve.port": PORT})

    with at_head(hosts, SERVE, "configs/tiny-qwen3.yaml", settings) as service:
        where = service.read()
        try:
            with at_head(hosts, CLIENT, f"http://127.0.0.1:{PORT}/v1") as client:
                client.write([PROMPTS, NUM_TOKENS])
                texts = client.read()
        finally:
            os.killpg(service.pid, signal.SIGTERM)

    assert sorted(where) == [[node.address] * 2 for node in hosts.others]
    config = load_config("configs/tiny-qwen3.yaml", {**APART, "parallel.dp": 1})
    decode = partial(Tokenizer.decode, Tokenizer(config.model))
    assert texts == [decode(tokens) for tokens in on_one_node(config, PROMPTS, NUM_TOKENS)]
