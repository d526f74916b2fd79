"""Two groups, each over two nodes. The first group computes prompts. Both nodes of the second group
fetch the KV of these prompts.
"""

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

SETTINGS = {**APART, **COPIES, "parallel.tp_across_nodes": True}
FETCHED = r"^dist_aclgraph_kv_fetched_blocks_total\{.*\} (\S+)$"
LOADED = r"^dist_aclgraph_kv_copied_blocks_total\{.*outcome=\"loaded\".*\} (\S+)$"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four nodes with one NPU each, so that a group of two ranks needs two nodes. Each node has its
    own home folder, in which it keeps its copies of KV.
    """

    def node(name: str) -> dict[str, Any]:
        home = str(tmp_path_factory.mktemp(name))
        token = str(Path.home() / ".ray" / "auth_token")
        return {
            "resources": {"NPU": 1},
            "env_vars": {"HOME": home, "RAY_AUTH_TOKEN_PATH": token},
        }

    made = Nodes([node(name) for name in ("one", "two", "three", "four")])
    yield made
    made.end()


def counted(client: openai.OpenAI, pattern: str) -> float:
    with urllib.request.urlopen(str(client.base_url.join("/metrics"))) as reply:
        return sum(map(float, re.findall(pattern, reply.read().decode(), re.M)))


def test_groups_over_two_nodes_fetch_prompts_from_each_other(nodes: Nodes) -> None:
    prompts = [[first, *range(3, 100)] for first in range(4)]
    with service(nodes, SETTINGS) as (where, client):
        answers = [complete(client, prompt) for prompt in prompts]
        fetched, loaded = counted(client, FETCHED), counted(client, LOADED)

    assert len({node for group in where for node in group}) == 4, where
    assert answers == texts_of_one_node(prompts)
    assert fetched > 0 and loaded > 0


def test_lost_workers_of_a_prefill_group_change_no_answer(nodes: Nodes) -> None:
    prompts = [[first, *range(3, 100)] for first in range(24)]
    with service(nodes, SETTINGS) as (_, client), ThreadPoolExecutor(4) as threads:
        workers = [pid for pid in nodes.actors if processes.name_of(pid).startswith("ray::Worker")]
        answers = []
        for index, answer in enumerate(threads.map(partial(complete, client), prompts)):
            answers.append(answer)
            if index == 4:  # four more requests run
                os.kill(workers[0], signal.SIGKILL)

    assert answers == texts_of_one_node(prompts)
