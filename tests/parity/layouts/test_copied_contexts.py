"""If several ranks share the KV of requests, tokens stay the same after this KV was read from
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.context.shards import Shards
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS
from tests.parity.layouts.test_context_parallel import QWEN, V3, Layout, name
from tests.slow import spread

BLOCK_SIZE = 16
LAYOUTS = [
    Layout(V3, 1, 2, 2, drafts=1),
    Layout(V3, 2, 1, 2, interleave=BLOCK_SIZE),
    Layout(QWEN, 1, 2, 1),
    Layout(QWEN, 4, 1, 2),
    Layout(QWEN, 2, 2, 2, interleave=4),
]
QUICK, MORE = [LAYOUTS[-1]], LAYOUTS[:-1]


@pytest.mark.parametrize("layout", spread(LAYOUTS, QUICK, MORE), ids=name)
def test_tokens_are_those_of_computed_blocks(
    references: Any, tmp_path: Path, layout: Layout
) -> None:
    reference = references(layout.architecture)
    sizes = {"tp": layout.tp, "pcp": layout.pcp, "dcp": layout.dcp}
    config = make_deployment_config(
        reference.directory,
        parallel={**sizes, "cp_interleave": layout.interleave},
        speculative={"num_tokens": layout.drafts},
        graph={"mode": layout.mode},
        kv={
            "block_size": BLOCK_SIZE,
            "num_blocks": 256,  # enough blocks for all requests, so that none is preempted
            "host_path": str(tmp_path),
            "host_gib": 0.1,
        },
    )
    size = Shards.from_config(config).tokens_per_block
    num_full = sum((len(prompt) - 1) // size for prompt in reference.prompts)
    with lockstep(config) as group:
        computed = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        assert group.scheduler.copies.counts()["loaded"] == 0
        group.restart()
        read = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        counts = group.scheduler.copies.counts()

    assert [answer.tokens for answer in computed] == reference.tokens
    assert [answer.tokens for answer in read] == reference.tokens
    assert num_full > 0 and (counts["loaded"], counts["missed"]) == (num_full, 0)
