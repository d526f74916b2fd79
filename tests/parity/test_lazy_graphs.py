"""Batches whose shapes have no graph in the plan get lazy graphs while the group serves, and no
token changes.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.planning.buckets import asked_sizes
from tests.deployments import deployed, greedy_params, make_deployment_config, serving
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS
from tests.slow import slow


@deployed
@pytest.mark.parametrize("tp", [slow(1), 2])
def test_frequent_shapes_are_captured_while_serving(references: Any, tp: int) -> None:
    reference = references("Qwen3ForCausalLM")
    config = make_deployment_config(
        reference.directory,
        parallel={"tp": tp},
        graph={"sizes": (1, 12), "lazy": "on", "lazy_capacity": 2, "lazy_min_tokens": 100},
    )

    with serving(config) as service:
        for wave in range(4):
            for count in (3, 6):  # these batches use size 12 until graphs of sizes 4 and 8 exist
                answers = service.generate(
                    reference.prompts[:count], greedy_params(NUM_TOKENS), f"{wave}-{count}-"
                )
                assert [a.tokens for a in answers] == reference.tokens[:count]
        report = service.report()

    lazy = {bucket["graph"]: bucket for bucket in report["buckets"] if bucket["is_lazy"]}
    assert 1 <= len(lazy) <= 2
    assert any(bucket["replays"] > 0 for bucket in lazy.values())
    assert report["plan"]["families"] == {"full decode": [1, 12]}
    assert report["rollbacks"] == []


@deployed
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp": 2, "ep": 2}, id="experts", marks=pytest.mark.slow),
        pytest.param({"pcp": 2, "dcp": 2}, id="contexts", marks=pytest.mark.slow),
    ],
)
def test_shapes_of_drafts_over_ranks_that_share_something_are_captured_while_serving(
    references: Any, parallel: dict[str, int]
) -> None:
    reference = references("DeepseekV3ForCausalLM")
    config = make_deployment_config(
        reference.directory,
        parallel=parallel,
        speculative={"num_tokens": 1},
        graph={"sizes": (2, 24), "lazy": "decode", "lazy_capacity": 2, "lazy_min_tokens": 100},
    )
    count = 3 * parallel.get("dp", 1)

    with serving(config) as service:
        # Each rank runs three requests with 6 tokens in all. They use the graph of size 24 until a
        # graph of size 8 exists.
        for wave in range(4):
            prompts = reference.prompts[:count]
            answers = service.generate(prompts, greedy_params(NUM_TOKENS), f"{wave}-")
            assert [a.tokens for a in answers] == reference.tokens[:count]
        report = service.report()

    lazy = [bucket for bucket in report["buckets"] if bucket["is_lazy"]]
    assert any(bucket["replays"] > 0 for bucket in lazy)
    assert all(bucket["bucket"] % 2 == 0 for bucket in report["buckets"])
    assert report["rollbacks"] == []


def test_the_cache_leaves_the_bytes_that_lazy_graphs_of_another_kind_need(references: Any) -> None:
    directory, blocks = references("Qwen3ForCausalLM").directory, {}
    for mode, lazy in (("FULL_DECODE_ONLY", "on"), ("FULL_AND_PIECEWISE", "off")):
        config = make_deployment_config(
            directory,
            graph={"mode": mode, "lazy": lazy, **asked_sizes(mode, (12,), (512,))},
            device={"emulator": {"strict": False, "memory_mb": 128}},
            kv={"num_blocks": None, "block_size": 16, "memory_fraction": 0.2},
        )
        with lockstep(config) as group:
            blocks[mode] = group.report()["num_blocks"]

    assert blocks["FULL_DECODE_ONLY"] == blocks["FULL_AND_PIECEWISE"]
