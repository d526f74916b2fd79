"""Some nodes have fewer free NPUs than a group needs. These NPUs must stay unused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.cluster.several_nodes import APART, Nodes
from tests.cluster.test_lost_nodes import ANSWER, ask

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CONFIG = "configs/tiny-qwen3.yaml"
IN_A_RACK = {
    **APART, "parallel.tp": 2, "parallel.dp": 2, "graph.sizes": [4], "cluster.labels.rack": "r1",
}  # fmt: skip
ROLL = """
def roll(llm, change):
    from dist_aclgraph.config import load_config

    llm._deployment.roll(load_config(sys.argv[1], json.loads(sys.argv[2]) | change))
    return llm.report()["num_blocks"]
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(
        [
            {},
            *({"resources": {"NPU": 3}, "labels": {"rack": "r1"}} for _ in range(2)),
            {"resources": {"NPU": 2}, "labels": {"rack": "r2"}},
        ]
    )
    yield made
    made.end()


def test_free_npus_that_no_group_can_use_do_not_count(nodes: Nodes) -> None:
    imports, program_text = ANSWER.split("def say", 1)
    code = f"{imports}{ROLL}\ndef say{program_text}"
    with nodes.run(code, CONFIG, json.dumps(IN_A_RACK)) as program:
        assert program.read() == "up"
        before, *_ = ask(program, "where")
        begun_s = time.monotonic()

        refused = ask(program, "scale", 3)

        assert "1 groups more need 2 NPUs; free are 2" in refused
        assert "a group takes 1 times 2 on one node" in refused
        assert time.monotonic() - begun_s < IN_A_RACK["timeouts.place_s"], "it waited for room"

        # No NPU is free for a new group until an old group has ended.
        assert ask(program, "roll", {"kv.num_blocks": 77}) == 77

        now, missing, *_ = ask(program, "where")
        assert (sorted(now), missing) == (sorted(before), 0)
