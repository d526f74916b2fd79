"""A group fetches the KV of prompts from a group on another node over HIXL."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.several_nodes import APART, COPIES, Nodes
from tests.cluster.test_several_nodes import complete, service, texts_of_one_node

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.rare]

SETTINGS = {**APART, **COPIES, "kv.transport": "hixl", "kv.closed_network": True}
FETCHED = r"^dist_aclgraph_kv_fetched_blocks_total\{.*\} (\S+)$"
FAILED = r"^dist_aclgraph_kv_failed_fetches_total\{.*\} (\S+)$"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes. For the emulator, each is a separate host, so links between them are RoCE."""

    def node(name: str) -> dict[str, Any]:
        home = str(tmp_path_factory.mktemp(name))
        token = str(Path.home() / ".ray" / "auth_token")
        return {
            "resources": {"NPU": 2},
            "env_vars": {
                "HOME": home, "RAY_AUTH_TOKEN_PATH": token, "EMULATED_NPU": f"host={name}",
            },
        }  # fmt: skip

    made = Nodes([node(name) for name in ("left", "right")])
    yield made
    made.end()


def counted(client: Any, pattern: str) -> float:
    with urllib.request.urlopen(str(client.base_url.join("/metrics"))) as reply:
        return sum(map(float, re.findall(pattern, reply.read().decode(), re.M)))


def test_answers_are_those_of_one_node(nodes: Nodes) -> None:
    prompts = [[first, *range(3, 100)] for first in range(4)]
    with service(nodes, SETTINGS) as (where, client):
        answers = [complete(client, prompt) for prompt in prompts]
        fetched, failed = counted(client, FETCHED), counted(client, FAILED)

    assert len({node for group in where for node in group}) == 2, where
    assert answers == texts_of_one_node(prompts)
    assert fetched > 0 and failed == 0
