"""Two ranks with different numbers of free streams get the same plan, and use as many streams as
predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.kv.cache_spec import KVCacheSpec, PagedTensor
from dist_aclgraph.planning.buckets import asked_sizes
from tests.checkpoints import make_prompts
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import Lockstep, lockstep
from tests.slow import slow

STREAMS_BEFORE = 36  # free streams of each of the two ranks when it makes its offer
# For each graph mode, the number of free streams of the rank with fewer free streams. This number
# is too small to capture all sizes.
FREE = {"FULL_DECODE_ONLY": 18, "PIECEWISE": 55, "FULL": 18, "FULL_AND_PIECEWISE": 55}
# Two numbers of streams that each of two ranks needs: for a full decode graph, and for all pieces
# of a piecewise graph of three layers.
DECODE, PIECES = 4, 16
PRICES = {
    "full decode": DECODE,
    "full mixed": DECODE,
    "piecewise mixed": PIECES,
}


def make_config(checkpoint: Path, mode: str, model: str, **others: Any) -> Config:
    emulator = {"strict": False, **others.pop("emulator", {})}
    most = others.get("scheduler", {}).get("max_num_seqs", 12)
    decode, both = sorted({1, 2, 3, 4, 6, 8, 12, most}), mode == "FULL_AND_PIECEWISE"
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        scheduler={"max_num_batched_tokens": 64, **others.pop("scheduler", {})},
        graph={
            "mode": mode,
            "budget_model": model,
            **asked_sizes(mode, decode, (8, 24, 48, 64) if both else (*decode, 64)),
            "reserve_streams": 2,
            "lazy": "off",
        },
        device={"emulator": emulator},
        **others,
    )


def assert_serves(group: Lockstep) -> None:
    answers = group.generate(make_prompts([3, 20, 40]), greedy_params(12))
    assert all(len(answer.tokens) == 12 for answer in answers)


def streams_of(plan: dict[str, Any]) -> int:
    return sum(PRICES[name] * len(buckets) for name, buckets in plan["families"].items())


@pytest.mark.parametrize("mode", [*map(slow, list(FREE)[:-1]), "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("model", [slow("calibrated"), "cann-pinned"])
def test_a_mixed_pair_captures_what_its_tighter_rank_affords_as_predicted(
    checkpoint: Path, mode: str, model: str
) -> None:
    free = FREE[mode]
    streams = {0: 900, 1: STREAMS_BEFORE + free + 2}
    with lockstep(
        make_config(checkpoint, mode, model, emulator={"streams_by_rank": streams})
    ) as group:
        assert_serves(group)
        report = group.report()

    assert report["rollbacks"] == []
    taken = streams_of(report["plan"])
    assert free - min(PRICES[name] for name in report["plan"]["families"]) < taken <= free
    assert any("rank 1 affords" in reason for reason in report["plan"]["reasons"])
    for rank, offered in zip(report["ranks"], (900 - STREAMS_BEFORE - 2, free), strict=True):
        assert rank["warnings"] == []
        assert all(entry["measured"] is not None for entry in rank["ledger"]["entries"])
        assert rank["streams"]["offered"] == offered
        assert rank["streams"]["predicted"] == rank["streams"]["measured"] == taken


def test_the_rank_with_less_memory_sizes_the_cache_of_both(checkpoint: Path) -> None:
    config = make_config(
        checkpoint,
        "FULL_DECODE_ONLY",
        "calibrated",
        scheduler={"max_num_seqs": 160, "max_num_batched_tokens": 160},
        kv={"num_blocks": None},
        emulator={"memory_mb_by_rank": {0: 128}, "streams_by_rank": {1: STREAMS_BEFORE + 12}},
    )
    with lockstep(config) as group:
        assert_serves(group)
        report = group.report()

    assert streams_of(report["plan"]) == 8  # rank 1 offers ten streams; each graph needs four
    spec = KVCacheSpec(paged=(PagedTensor(3, 128),), block_size=128, dtype="float32")
    poor, rich = (rank["ledger"]["offered_bytes"] for rank in report["ranks"])
    fraction, most = config.kv.memory_fraction, config.kv.max_bytes
    assert poor < rich
    assert report["num_blocks"] == spec.blocks_that_fit(poor - report["pool_bytes"], fraction, most)


def test_software_queues_are_planned_by_ids_and_the_report_says_what_is_not_counted(
    checkpoint: Path,
) -> None:
    emulator = {"accounting": "software_sq", "streams_by_rank": {1: STREAMS_BEFORE + 40}}
    config = make_config(checkpoint, "FULL_AND_PIECEWISE", "calibrated", emulator=emulator)
    with lockstep(config) as group:
        assert_serves(group)
        report = group.report()

    assert report["rollbacks"] == []
    assert 38 - DECODE < streams_of(report["plan"]) <= 38
    for rank in report["ranks"]:
        assert [w.split(": ", 1)[1] for w in rank["warnings"]] == [
            "streams of graphs are not measured: this device's count does not follow them"
        ]


def test_a_wrong_model_is_found_out_and_the_term_named(checkpoint: Path) -> None:
    with lockstep(make_config(checkpoint, "FULL_DECODE_ONLY", "legacy-0.11")) as group:
        report = group.report()

    for rank in report["ranks"]:
        assert rank["warnings"]
        for warning in rank["warnings"]:
            assert f"rank {rank['rank']}: full decode" in warning
            assert "took 4 streams, predicted" in warning
            assert "nearest to the difference" in warning
