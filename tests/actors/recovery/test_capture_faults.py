"""If a capture fails on one of two ranks, the plan loses one bucket, or the start fails.

The error of a failed start names the cause of the failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.config import Config
from dist_aclgraph.errors import WorkerError
from tests.actors.leftovers import assert_all_npus_are_free
from tests.checkpoints import make_prompts
from tests.deployments import Serving, greedy_params, make_deployment_config, serving
from tests.lockstep import Lockstep, lockstep

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

SIZES = (1, 2, 4, 8, 12)
LAYERS = 3  # number of layers of the checkpoint; each launches one aclnnSwiGlu
MIXED_SIZES = (4, 8, 16)
STREAMS_BEFORE = 36  # number of free streams of a rank when it makes its offer
# A decode graph of two ranks needs two streams for its lanes, and two for a communication domain.
STREAMS_PER_GRAPH = 4
SMALLEST_SEGMENT = 2 << 20  # smallest size that torch's allocator requests
CAPTURE_S, STOP_S = 8.0, 2.0
STALL_S = 100.0  # seconds for which a rank stalls, and for which other ranks wait for it


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert_all_npus_are_free()


def make_faulty_config(
    checkpoint: Path,
    mode: str = "FULL_DECODE_ONLY",
    fault: Any = None,
    max_tokens: int = 32,
    capture_s: float = CAPTURE_S,
    **emulator: Any,
) -> Config:
    graph = {
        "mode": mode,
        # This budget model makes no probe captures and reserves no streams. So the plan's captures
        # are the device's first captures, and can use all streams.
        "budget_model": "legacy-0.11",
        "reserve_streams": 0,
        "sizes": SIZES,
        "lazy": "off",
    }
    if mode == "FULL_AND_PIECEWISE":
        graph["mixed_sizes"] = (*MIXED_SIZES, max_tokens)
    fault = {"rank": 1, **fault} if fault else {}
    return make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        scheduler={"max_num_batched_tokens": max_tokens},
        graph=graph,
        device={"emulator": {"strict": False, "fault": fault, **emulator}},
        timeouts={"step_s": 10.0, "capture_s": capture_s, "stop_s": STOP_S},
    )


def families(report: dict[str, Any]) -> dict[str, list[int]]:
    return dict(report["plan"]["families"])


def assert_serves(service: Serving | Lockstep) -> None:
    answers = service.generate(make_prompts([3, 20, 40]), greedy_params(12))
    assert all(len(answer.tokens) == 12 for answer in answers)
    assert sum(bucket["replays"] for bucket in service.report()["buckets"]) > 0


@pytest.mark.slow
def test_a_rank_out_of_streams_in_its_third_bucket_leaves_two_on_all(checkpoint: Path) -> None:
    streams = STREAMS_BEFORE + 2 * STREAMS_PER_GRAPH + 2
    with serving(make_faulty_config(checkpoint, streams_by_rank={1: streams})) as service:
        assert_serves(service)
        report = service.report()

    assert families(report) == {"full decode": [1, 12]}
    (rollback,) = report["rollbacks"]
    assert "full decode 4 was undone on all ranks: rank 1 failed (streams)" in rollback
    assert "capture of full decode 4 failed on rank 1 (streams)" in report["plan"]["reasons"][-1]
    for rank in report["ranks"]:
        assert rank["streams"]["measured"] == 2 * STREAMS_PER_GRAPH


@pytest.mark.slow
def test_memory_that_runs_out_inside_a_capture_costs_that_bucket_alone(checkpoint: Path) -> None:
    # At the second allocation, some pieces of the bucket's graph are already captured, and use
    # memory.
    fault = {"op": "alloc", "call": 2}
    config = make_faulty_config(checkpoint, "FULL_AND_PIECEWISE", fault, max_tokens=512)
    with lockstep(config) as group:
        assert_serves(group)
        report = group.report()

    assert families(report) == {"full decode": list(SIZES), "piecewise mixed": list(MIXED_SIZES)}
    (rollback,) = report["rollbacks"]
    assert "piecewise mixed 512 was undone on all ranks: rank 1 failed (memory)" in rollback
    assert report["ranks"][0]["streams"]["measured"] == report["ranks"][1]["streams"]["measured"]
    # The memory of the bucket that failed is free again. The smaller buckets fit in one segment of
    # the smallest size.
    assert report["pool_bytes"] == SMALLEST_SEGMENT


@pytest.mark.slow
def test_an_operator_that_fails_while_captured_costs_that_bucket_alone(checkpoint: Path) -> None:
    fault = {"op": "aclnnSwiGlu", "when": "capture", "call": 2 * LAYERS + 2}
    with lockstep(make_faulty_config(checkpoint, fault=fault)) as group:
        assert_serves(group)
        report = group.report()

    assert families(report) == {"full decode": [1, 2, 8, 12]}
    (rollback,) = report["rollbacks"]
    assert "full decode 4 was undone on all ranks: rank 1 failed (operator)" in rollback
    assert "SwiGlu" in rollback


def fail_to_start(config: Config) -> tuple[WorkerError, float, float]:
    """Return the error of a failed start, the seconds from the first capture to the error, and the
    seconds from the start to the error.

    The first of these times can be too short, because the report about the first capture can come
    late.
    """
    start_s = began_s = time.monotonic()

    def note(progress: Any) -> None:
        nonlocal began_s
        if progress.state in ("PLACING", "JOINING", "LOADING", "NEGOTIATING"):
            began_s = time.monotonic()

    with pytest.raises(WorkerError) as caught:
        deployment.start(config, note).shut_down()
    end_s = time.monotonic()
    return caught.value, end_s - began_s, end_s - start_s


@pytest.mark.slow
def test_a_rank_that_stalls_in_a_capture_is_named_alone_in_bounded_time(checkpoint: Path) -> None:
    fault = {"op": "aclnnSwiGlu", "when": "capture", "call": 5, "kind": "stall", "stall_s": STALL_S}

    error, seconds, in_all_s = fail_to_start(make_faulty_config(checkpoint, fault=fault))

    assert (error.rank, error.phase) == (1, "CAPTURING")
    assert "capture full decode 8 was not answered by rank 1 within 8 s" in str(error)
    assert seconds < STALL_S and in_all_s >= CAPTURE_S


@pytest.mark.slow
def test_ranks_silent_in_a_collective_are_all_named_and_none_is_blamed(checkpoint: Path) -> None:
    # The fault hits the fifth call of the operator, in the eager run before the first capture.
    fault = {"op": "aclnnSwiGlu", "call": LAYERS + 2, "kind": "stall", "stall_s": STALL_S}

    error, seconds, in_all_s = fail_to_start(make_faulty_config(checkpoint, fault=fault))

    assert (error.rank, error.phase) == (-1, "CAPTURING")
    assert "prepare full decode 12 was not answered by rank 0, 1 within 8 s" in str(error)
    assert "rank 0 waits for its device; rank 1 waits for its device" in str(error)
    assert seconds < STALL_S and in_all_s >= CAPTURE_S


@pytest.mark.slow
def test_a_rank_that_dies_in_a_capture_ends_the_start_at_once(checkpoint: Path) -> None:
    fault = {"op": "aclnnSwiGlu", "when": "capture", "call": 5, "kind": "die"}

    # The start must fail long before the time limit.
    error, *_ = fail_to_start(make_faulty_config(checkpoint, fault=fault, capture_s=600.0))

    assert (error.rank, error.phase) == (1, "CAPTURING")
    assert "died" in str(error)
