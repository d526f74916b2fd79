"""A group fetches the KV of prompts from a group on another node over HIXL."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from dist_aclgraph.actors.host import processes
from tests.cluster.several_nodes import APART, COPIES, Nodes
from tests.cluster.test_several_nodes import complete, service, texts_of_one_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.rare]

SETTINGS = {**APART, **COPIES, "kv.transport": "hixl", "kv.closed_network": True}


def start_nodes(folders: pytest.TempPathFactory, names: list[str], num_npus: int) -> Nodes:
    """Start nodes. The emulator treats each node as a separate host, so the links between nodes are
    RoCE.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) > 1:
        pytest.skip(f"{scope} lets no process access the memory of another one")

    def node(name: str) -> dict[str, Any]:
        variables = {
            "HOME": str(folders.mktemp(name)),
            "RAY_AUTH_TOKEN_PATH": str(Path.home() / ".ray" / "auth_token"),
            "EMULATED_NPU": f"host={name}",
        }
        return {"resources": {"NPU": num_npus}, "env_vars": variables}

    return Nodes([node(name) for name in names])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = start_nodes(tmp_path_factory, ["left", "right"], 2)
    yield made
    made.end()


def counted(client: openai.OpenAI, name: str) -> float:
    with urllib.request.urlopen(str(client.base_url.join("/metrics"))) as reply:
        found = re.findall(rf"^dist_aclgraph_{name}\{{.*\}} (\S+)$", reply.read().decode(), re.M)
    return sum(map(float, found))


def prompts_from(first: int, count: int) -> list[list[int]]:
    """Return ``count`` prompts that no other test of this module uses. The nodes keep the files of
    earlier prompts.
    """
    return [[number, *range(3, 100)] for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("model", "drafts"), [("tiny-qwen3", 0), ("tiny-deepseek", 1), ("tiny-qwen3.5", 0)]
)
def test_answers_are_those_of_one_node(nodes: Nodes, model: str, drafts: int) -> None:
    """One model has keys and values, one has latents and drafts, and one has recurrent states."""
    prompts = prompts_from(0, 4)
    changes = {"model": f"models/{model}", "speculative.num_tokens": drafts}
    with service(nodes, {**SETTINGS, **changes}) as (where, client):
        answers = [complete(client, prompt, model) for prompt in prompts]
        fetched = counted(client, "kv_fetched_blocks_total")

    assert len({node for group in where for node in group}) == 2, where
    assert answers == texts_of_one_node(prompts, changes)
    assert fetched > 0


def test_a_transfer_that_does_not_end_changes_no_answer(nodes: Nodes) -> None:
    """After the timeout, the link and the fetch end, and the group computes the prompt itself."""
    fault = {"op": "adxl_transfer", "kind": "stall", "stall_s": 3600.0, "call": 3}
    prompts = prompts_from(10, 4)
    with service(nodes, {**SETTINGS, "device.emulator.fault": fault}) as (_, client):
        answers = [complete(client, prompt) for prompt in prompts]
        failed = counted(client, "kv_failed_fetches_total")

    assert answers == texts_of_one_node(prompts)
    assert failed > 0


def test_a_lost_source_changes_no_answer(nodes: Nodes) -> None:
    prompts = prompts_from(20, 24)
    with service(nodes, SETTINGS) as (_, client), ThreadPoolExecutor(4) as threads:
        workers = [pid for pid in nodes.actors if processes.name_of(pid).startswith("ray::Worker")]
        answers, fetched = [], 0.0
        for index, answer in enumerate(threads.map(partial(complete, client), prompts)):
            answers.append(answer)
            if index == 4:  # four more requests run
                fetched = counted(client, "kv_fetched_blocks_total")
                os.kill(workers[0], signal.SIGKILL)

    assert answers == texts_of_one_node(prompts)
    assert fetched > 0


def test_groups_over_two_nodes_fetch_on_both_nodes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    prompts = prompts_from(0, 4)
    nodes = start_nodes(tmp_path_factory, ["one", "two", "three", "four"], 1)
    try:
        with service(nodes, {**SETTINGS, "parallel.tp_across_nodes": True}) as (where, client):
            answers = [complete(client, prompt) for prompt in prompts]
            fetched = counted(client, "kv_fetched_blocks_total")
    finally:
        nodes.end()

    assert len({node for group in where for node in group}) == 4, where
    assert answers == texts_of_one_node(prompts)
    assert fetched > 0
