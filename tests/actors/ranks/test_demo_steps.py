"""Decode steps of the demo configurations have no unnecessary host waits, no AI CPU operators and
no unaligned views.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.sampling import SamplingParams
from tests.lockstep import lockstep
from tests.slow import slow

CONFIGS = Path(__file__).parents[3] / "configs"
# Only the tiny models have their weights in the repository.
DEMOS = sorted(path.stem for path in CONFIGS.glob("tiny-*.yaml"))
# For each demo, the operators that may read unaligned views. In linear attention, one product
# returns the small tensors ``b`` and ``a`` side by side, so the address of ``a`` is not aligned.
UNALIGNED = {"tiny-qwen3.5": {"aclnnAdd", "aclnnInplaceCopy"}}


# Steps of these models take ten times as long as the steps of the other demo models.
LONG = ("tiny-deepseek-cp", "tiny-deepseek-v32")


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in DEMOS])
def test_between_two_decode_steps_the_host_waits_for_the_tokens_alone(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    with lockstep(config) as group:
        for i in range(3):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            group.submit(f"r{i}", [5 + i, 6, 7, 8], params)
        decoding = []
        while group.scheduler.has_work:
            plan = group.schedule()
            assert plan is not None
            ranks = group.run(plan)
            if plan.graph is not None:
                decoding.append(ranks)

    assert len(decoding) > 3
    # If several ranks run the same requests, only the first rank reports the sampled tokens.
    ranks_per_batch = config.parallel.tp * config.parallel.pcp
    for index, step in enumerate(decoding[0]):
        assert bool(step.result.token_ids) == (index % ranks_per_batch == 0)
    for step in (step for ranks in decoding[1:] for step in ranks):
        assert set(step.slow) <= UNALIGNED.get(name, set())
        assert step.counted["host_syncs"] == 1 and step.counted["ai_cpu"] == 0
        assert step.counted["unaligned_views"] == 0 or name in UNALIGNED
