"""Processes of a group on two nodes die. The group uses all NPUs of the cluster, so no other NPU is
free.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.planning.way_back import SOUND_S
from tests.cluster.several_nodes import OVER_NODES, Nodes, Program, on_one_node
from tests.cluster.test_lost_nodes import ANSWER, ask
from tests.slow import rare

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CONFIG = "configs/tiny-deepseek.yaml"
PROMPTS = [[70 + i, 71, 72] for i in range(8)]
NUM_TOKENS = 120


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes([{}, *({"resources": {"NPU": 2}} for _ in range(2))])
    yield made
    made.end()


def strike(program: Program, pid: int) -> Any:
    """Kill the process ``pid`` while requests run; return the tokens of the requests."""
    assert ask(program, "generate_and_tell", PROMPTS, NUM_TOKENS) == "running"
    os.kill(pid, signal.SIGKILL)
    tokens, num_resumed = program.read()
    assert num_resumed > 0
    return tokens


@pytest.mark.parametrize("first", ["worker", rare("engine")])
def test_survivors_of_all_nodes_go_on_and_right_behind_that_all_is_built_anew(
    nodes: Nodes, first: str
) -> None:
    config = load_config(CONFIG, OVER_NODES)
    alone = on_one_node(config, PROMPTS, NUM_TOKENS)
    with nodes.run(ANSWER, CONFIG, json.dumps(OVER_NODES)) as program:
        assert program.read() == "up"
        where, _, workers, [engine] = ask(program, "where")

        start_s = time.monotonic()
        assert strike(program, engine if first == "engine" else workers[3]) == alone

        now, _, survivors, [another] = ask(program, "where")
        assert (now, another != engine) == (where, True)
        assert survivors[:3] == workers[:3]
        assert (survivors[3] == workers[3]) == (first == "engine")

        is_soon = time.monotonic() - start_s < SOUND_S
        assert strike(program, another if first == "worker" else survivors[0]) == alone

        if not is_soon:
            pytest.skip("the machine is so slow that the group counted as sound again")
        assert not set(ask(program, "where")[2]) & set(survivors)
