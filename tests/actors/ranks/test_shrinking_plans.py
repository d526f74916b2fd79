"""If one rank runs out of streams or memory during capture, the plan of all ranks loses buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import make_prompts
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import Lockstep, lockstep


def make_short_config(checkpoint: Path, **device: Any) -> Any:
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        # The budget model of an old release predicts too few streams, and no streams are reserved.
        # So captures fail.
        graph={
            "budget_model": "legacy-0.11",
            "reserve_streams": 0,
            "sizes": tuple(range(1, 13)),
            "lazy": "off",
        },
        device={"emulator": {"strict": False, **device}},
        timeouts={"step_s": 10.0, "capture_s": 30.0},
    )


def assert_serves(group: Lockstep) -> None:
    answers = group.generate(make_prompts([3, 20, 40]), greedy_params(20))
    assert all(len(answer.tokens) == 20 for answer in answers)


def test_a_rank_short_of_streams_shrinks_the_plan_of_all(checkpoint: Path) -> None:
    with lockstep(make_short_config(checkpoint, streams_by_rank={1: 64})) as group:
        report = group.report()
        assert_serves(group)
        replays = sum(bucket["replays"] for bucket in group.report()["buckets"])

    assert 0 < len(report["buckets"]) < 12
    assert any("rank 1" in line for line in [*report["rollbacks"], *report["plan"]["reasons"]])
    assert replays > 0
