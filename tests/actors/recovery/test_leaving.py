"""Ranks that leave their group first free their graphs, and then their communicators, as HCCL
requires.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep

LIMIT_S, NEXT_EPOCH = 30.0, 2


def test_a_rank_that_leaves_destroys_all_graphs_and_then_all_communicators(
    npu: Any, checkpoint: Path
) -> None:
    config = make_deployment_config(checkpoint, parallel={"tp": 2}, graph={"sizes": (1,)})

    with lockstep(config) as group:
        ranks = group.ranks
        group.submit("r", [1, 2, 3], greedy_params(3))
        while (plan := group.schedule()) is not None:
            group.run(plan)
        before = ranks.call("counters", "SERVING", LIMIT_S)
        ranks.call("stop_device", "SERVING", LIMIT_S, lambda rank: (LIMIT_S,))
        ranks.call("leave", "SERVING", LIMIT_S, lambda rank: (NEXT_EPOCH,))
        after = ranks.call("counters", "SERVING", LIMIT_S)

    for had, has in zip(before, after, strict=True):
        assert had["graphs"] > 0 and had["domains"] > 0
        assert (has["graphs"], has["domains"], has["careless_destroys"]) == (0, 0, 0)
