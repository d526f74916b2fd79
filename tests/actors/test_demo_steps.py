"""The demo configurations decode without host waits, AI CPU operators and unaligned views."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.sampling import SamplingParams
from tests.lockstep import lockstep

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "name,counts",
    [
        ("tiny-qwen3", ("host_syncs", "ai_cpu", "unaligned_views")),
        # Some launches of its eager steps and drafts are given unaligned views: docs/hardware.md.
        ("tiny-deepseek", ("host_syncs", "ai_cpu")),
        ("tiny-deepseek-cp", ("host_syncs", "ai_cpu")),
    ],
)
def test_between_two_decode_steps_the_host_waits_for_the_tokens_alone(
    name: str, counts: tuple[str, ...]
) -> None:
    with lockstep(load_config(CONFIGS / f"{name}.yaml")) as group:
        for i in range(3):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            group.submit(f"r{i}", [5 + i, 6, 7, 8], params)
        decoding = []
        while group.scheduler.has_work:
            plan = group.schedule()
            assert plan is not None
            counted = [step.counted for step in group.run(plan)]
            if plan.graph is not None:
                decoding.append(counted)

    assert len(decoding) > 3
    expected = {"host_syncs": 1, "ai_cpu": 0, "unaligned_views": 0}
    for ranks in decoding[1:]:
        for counted in ranks:
            assert {key: counted[key] for key in counts} == {key: expected[key] for key in counts}
