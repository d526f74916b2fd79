"""With experts on several data-parallel ranks of one lockstep group, tokens equal those of
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments import deployed, greedy_params, make_deployment_config, serving
from tests.lockstep import lockstep

NUM_TOKENS = 16


@pytest.mark.slow
@deployed
@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        ({"dp": 2, "ep": 2}, "FULL_DECODE_ONLY"),
        ({"dp": 2, "ep": 2, "exchange": "all_to_all", "expert_capacity": 1.0}, "FULL_DECODE_ONLY"),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(
    references: Any, parallel: dict[str, Any], mode: str
) -> None:
    reference = references("Qwen3MoeForCausalLM")
    config = make_deployment_config(reference.directory, parallel=parallel, graph={"mode": mode})

    with serving(config) as service:
        answers = service.generate(reference.prompts, greedy_params(NUM_TOKENS))
        alone = service.generate(reference.prompts[:1], greedy_params(NUM_TOKENS), "alone")
        report = service.report()

    expected = [tokens[:NUM_TOKENS] for tokens in reference.tokens]
    assert [answer.tokens for answer in answers] == expected
    assert alone[0].tokens == expected[0], "while the other rank was idle"
    assert report["groups"] == [], "all ranks are one lockstep group"
    metrics = report["metrics"]
    assert len(metrics["num_requests_running_by_dp_rank"]) == 2
    assert len(metrics["expert_tokens"]) == config.parallel.ep
    assert min(metrics["expert_tokens"].values()) > 0
    if mode != "NONE":
        assert sum(bucket["replays"] for bucket in report["buckets"]) > 0
    if "expert_capacity" in parallel:
        assert metrics["step_reruns"] > 0


@pytest.mark.slow
def test_shared_experts_on_a_stream_of_their_own_change_nothing_but_streams(
    references: Any,
) -> None:
    reference = references("DeepseekV3ForCausalLM")
    tokens, streams = {}, {}
    for overlaps in (False, True):
        config = make_deployment_config(
            reference.directory,
            parallel={"tp": 2, "dp": 2, "ep": 4},
            graph={
                "overlap_shared_experts": overlaps,
                "budget_model": "cann-pinned",
                "sizes": (4, 12, 24),
            },
            speculative={"num_tokens": 1},
        )
        with lockstep(config) as group:
            answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
            report = group.report()
        tokens[overlaps] = [answer.tokens for answer in answers]
        streams[overlaps] = [rank["streams"]["measured"] for rank in report["ranks"]]
        for rank in report["ranks"]:
            entries = rank["ledger"]["entries"]
            graphs = [entry for entry in entries if entry["unit"] == "streams"]
            assert rank["streams"]["predicted"] == rank["streams"]["measured"]
            assert all(("overlap" in entry["parts"]) == overlaps for entry in graphs)

    assert tokens[True] == tokens[False] == [t[:NUM_TOKENS] for t in reference.tokens]
    # With overlap, each graph needs one more stream. There are six graphs: for each of three sizes,
    # a graph of the decoder and a graph of drafts.
    assert [on - off for on, off in zip(streams[True], streams[False], strict=True)] == [6] * 4
