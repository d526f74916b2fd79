"""Requests that share blocks can together use more blocks than the cache has. CANN 8.5 counts a
shared block once for each request, and refuses a call if the sum exceeds the cache's blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.checkpoints import make_prompts
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.rounding import assert_best_but_for_rounding

NUM_BLOCKS = 8  # including the dummy block


def test_requests_share_a_prefix_in_a_cache_that_is_nearly_full(references: Any) -> None:
    reference = references("Qwen3ForCausalLM")
    (prefix,) = make_prompts([256], seed=1)  # the prefix takes two blocks
    prompts = [prefix + end for end in make_prompts([3, 40, 90, 100, 7, 120], seed=2)]
    config = make_deployment_config(
        reference.directory,
        dtype="bfloat16",
        device={"emulator": {"strict": True, "cann": "8.5.0"}},
        parallel={"tp": 2},
        graph={"mode": "FULL_AND_PIECEWISE", "sizes": (1, 4, 6), "mixed_sizes": (16, 64)},
        scheduler={"max_num_seqs": 6},
        kv={"num_blocks": NUM_BLOCKS},
    )

    with lockstep(config) as group:
        # The first request runs alone and puts the prefix into the cache. All other requests use
        # this prefix.
        answers = group.generate(prompts[:1], greedy_params(16), "first")
        answers += group.generate(prompts[1:], greedy_params(16))
        stats = group.scheduler.stats()
        buckets = group.report()["buckets"]

    assert stats["cached_tokens"] > 0
    assert any(bucket["replays"] for bucket in buckets)
    asked = replace(reference, prompts=prompts)
    assert_best_but_for_rounding(asked, [answer.tokens for answer in answers])
