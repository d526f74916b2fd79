"""The demo configurations decode without host waits, AI CPU operators and unaligned views."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.sampling import SamplingParams
from tests.lockstep import lockstep

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-deepseek"])
def test_between_two_decode_steps_the_host_waits_for_the_tokens_alone(name: str) -> None:
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
    for counted in decoding[1:]:
        assert all(of_rank == expected for of_rank in counted), counted
