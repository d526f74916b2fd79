"""Deployments run on several nodes of a Ray cluster. Clients run on the head, which has no NPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import pytest
import zmq

from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.wire.addresses import Endpoint, PeerKeys
from dist_aclgraph.config import load_config
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.actors.listening import listening
from tests.actors.strangers import (
    NUM_JUNK,
    STRANGERS,
    Stranger,
    refusal_of,
    send_frames,
    send_raw,
)
from tests.cluster.several_nodes import (
    APART,
    COPIES,
    GENERATE,
    NUM_TOKENS,
    OVER_NODES,
    PORTS,
    PROMPTS,
    SERVE,
    Nodes,
    Program,
    on_one_node,
)
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HEAD, LEFT, RIGHT = "127.0.0.2", "127.0.0.3", "127.0.0.4"
STREAM_TOKENS = 400


class Deployed:
    """A deployment that a program on the head starts and uses."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.ranks, addresses = program.read()
        [found] = addresses
        keys = {name: value.encode() for name, value in found["keys"].items()}
        self.endpoint = Endpoint(found["url"], PeerKeys(**keys))

    def begin(self, prompts: list[list[int]], count: int) -> None:
        self._program.write([prompts, count])

    def finish(self) -> list[list[int]]:
        tokens: list[list[int]]
        tokens, _ = self._program.read()
        return tokens

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        self.begin(prompts, count)
        return self.finish()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A cluster in which each node with NPUs has its own home folder, so that nodes share no files
    there.
    """

    def with_npus(name: str) -> dict[str, Any]:
        home = str(tmp_path_factory.mktemp(name))
        token = str(Path.home() / ".ray" / "auth_token")
        return {
            "resources": {"NPU": 2},
            "labels": {"rack": name},
            "env_vars": {"HOME": home, "RAY_AUTH_TOKEN_PATH": token},
        }

    made = Nodes([{}, with_npus("left"), with_npus("right")])
    yield made
    made.end()


@contextmanager
def service(nodes: Nodes, overrides: dict[str, Any]) -> Iterator[tuple[Any, openai.OpenAI]]:
    port = free_port()
    settings = json.dumps({**overrides, "serve.port": port})
    with nodes.run(SERVE, "configs/tiny-qwen3.yaml", settings) as program:
        where = program.read()
        url = f"http://127.0.0.1:{port}/v1"
        try:
            with openai.OpenAI(base_url=url, api_key="none", timeout=300, max_retries=20) as client:
                yield where, client
        finally:
            os.kill(program.pid, signal.SIGTERM)


def complete(client: openai.OpenAI, prompt: list[int], model: str = "tiny-qwen3") -> str:
    """Return the text of the greedy completion of ``prompt``."""
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    return answer.choices[0].text


def texts_of_one_node(
    prompts: list[list[int]], changes: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    config = load_config("configs/tiny-qwen3.yaml", {**APART, "parallel.dp": 1, **changes})
    tokenizer = Tokenizer(config.model)
    return [tokenizer.decode(tokens) for tokens in on_one_node(config, prompts, NUM_TOKENS)]


def test_groups_on_a_node_each_answer_the_openai_client_at_the_head(nodes: Nodes) -> None:
    """This test must come before the tests that share a deployment, which keeps the NPUs."""
    with service(nodes, APART) as (where, client):
        answers = [complete(client, prompt) for prompt in PROMPTS]

    assert sorted(where) == [[LEFT, LEFT], [RIGHT, RIGHT]]
    assert answers == texts_of_one_node(PROMPTS)


@pytest.mark.rare
def test_a_group_fetches_prompts_from_a_group_on_another_node(nodes: Nodes) -> None:
    """This test must come before the tests that share a deployment, which keeps the NPUs."""
    prompts = [[first, *range(3, 100)] for first in range(4)]
    with service(nodes, {**APART, **COPIES}) as (where, client):
        answers = [complete(client, prompt) for prompt in prompts]
        address = client.base_url.join("/metrics")
        with urllib.request.urlopen(str(address)) as reply:
            metrics = reply.read().decode()

    assert sorted(where) == [[LEFT, LEFT], [RIGHT, RIGHT]]
    counts = re.findall(r"^dist_aclgraph_kv_fetched_blocks_total\{.*\} (\S+)$", metrics, re.M)
    assert sum(map(float, counts)) > 0, metrics
    assert answers == texts_of_one_node(prompts)


@pytest.mark.rare
def test_engines_that_die_while_prompts_are_fetched_change_no_answer(nodes: Nodes) -> None:
    """This test must come before the tests that share a deployment, which keeps the NPUs."""
    prompts = [[first, *range(3, 100)] for first in range(24)]
    with service(nodes, {**APART, **COPIES}) as (_, client), ThreadPoolExecutor(4) as threads:
        engines = [pid for pid in nodes.actors if processes.name_of(pid).startswith("ray::Engine")]
        answers = []
        for index, answer in enumerate(threads.map(partial(complete, client), prompts)):
            answers.append(answer)
            if index in (4, 12):  # four more requests run
                os.kill(engines.pop(), signal.SIGKILL)

    assert answers == texts_of_one_node(prompts)


@pytest.fixture(scope="module")
def spanning(nodes: Nodes) -> Iterator[Deployed]:
    config = json.dumps(OVER_NODES)
    with nodes.run(GENERATE, "configs/tiny-deepseek.yaml", config) as program:
        yield Deployed(program)


def test_a_group_spans_nodes_and_its_tensor_parallel_groups_do_not(spanning: Deployed) -> None:
    where = [(rank["node"], tuple(rank["npu_ids"])) for rank in spanning.ranks]

    assert sorted(where) == [(LEFT, (0,)), (LEFT, (1,)), (RIGHT, (0,)), (RIGHT, (1,))]
    assert [npus for _, npus in where] == [(0,), (1,), (0,), (1,)]
    assert where[0][0] == where[1][0] != where[2][0] == where[3][0]


def test_a_client_at_the_head_gets_the_tokens_of_one_node(spanning: Deployed) -> None:
    tokens = spanning.generate(PROMPTS, NUM_TOKENS)

    config = load_config("configs/tiny-deepseek.yaml", OVER_NODES)
    assert tokens == on_one_node(config, PROMPTS, NUM_TOKENS)
    assert spanning.endpoint.url.startswith("tcp://127.0.0.")


def test_no_channel_listens_at_a_wildcard(nodes: Nodes, spanning: Deployed) -> None:
    leader = spanning.ranks[0]["node"]

    found = {(host, port) for host, port in listening(nodes.actors) if port in PORTS}

    assert len(found) == 4  # ports for plans, for results, for clients, and to join the HCCL world
    assert {host for host, _ in found} == {leader}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_client_without_the_keys_is_refused(spanning: Deployed, stranger: Stranger) -> None:
    assert "the keys" in refusal_of(stranger(spanning.endpoint))


def test_junk_at_every_port_harms_no_stream(nodes: Nodes, spanning: Deployed) -> None:
    ports = [(host, port) for host, port in listening(nodes.actors) if port in PORTS]
    before = spanning.generate(PROMPTS[:1], STREAM_TOKENS)
    urls = [f"tcp://{host}:{port}" for host, port in ports]
    jobs: list[Any] = [(send_raw, url, NUM_JUNK // len(urls)) for url in urls]
    for endpoint in (spanning.endpoint, *(s(spanning.endpoint) for s in STRANGERS)):
        jobs.append((send_frames, endpoint, zmq.DEALER, NUM_JUNK // 4))
    work = [threading.Thread(target=job, args=arguments) for job, *arguments in jobs]
    spanning.begin(PROMPTS[:1], STREAM_TOKENS)
    for thread in work:
        thread.start()

    assert spanning.finish() == before
    for thread in work:
        thread.join(300)
        assert not thread.is_alive()
    assert spanning.generate(PROMPTS[:1], STREAM_TOKENS) == before
