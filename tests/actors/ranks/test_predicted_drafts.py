"""If steps have drafts, the number of streams that a graph needs is predicted correctly before its
capture.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments import make_deployment_config
from tests.lockstep import lockstep
from tests.slow import slow

MODELS = Path(__file__).parents[3] / "models"


@pytest.mark.parametrize(
    "parallel",
    [
        slow({"tp": 2, "ep": 2}),
        {"pcp": 2, "dcp": 2},
        slow({"tp": 2, "pcp": 2, "dcp": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", slow("FULL_AND_PIECEWISE")])
def test_graphs_of_drafts_are_priced_as_they_are_captured(
    mode: str, parallel: dict[str, int]
) -> None:
    assert_priced_as_captured("tiny-deepseek", mode, parallel)


def test_full_graphs_of_mixed_batches_are_priced_without_drafts() -> None:
    assert_priced_as_captured("tiny-deepseek-v32", "FULL", {"tp": 2})


def assert_priced_as_captured(model: str, mode: str, parallel: dict[str, int]) -> None:
    config = make_deployment_config(
        MODELS / model,
        dtype="bfloat16",
        parallel=parallel,
        scheduler={"max_num_seqs": 4},
        speculative={"num_tokens": 2},
        graph={
            "mode": mode,
            "budget_model": "cann-pinned",
            "sizes": (3, 12),
            **({} if mode == "FULL_DECODE_ONLY" else {"mixed_sizes": (8, 16)}),
            "lazy": "off",
        },
    )

    with lockstep(config) as group:
        ranks = group.report()["ranks"]

    for rank in ranks:
        assert rank["warnings"] == []
        assert rank["streams"]["predicted"] == rank["streams"]["measured"] > 0
