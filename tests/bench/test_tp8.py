"""The bench of graph modes runs on two ranks, and measures all modes in alternation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import runs
from tests.bench.runs import Bench, assert_says_what_ran_it, run_bench

pytestmark = [pytest.mark.cluster, pytest.mark.bench]

# The kinds of steps that each graph mode may run.
STEPS = {"NONE": {"eager"}, "PIECEWISE": {"piecewise"}, "FULL": {"full"}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    size = ["--tp", "2", "--layers", "2", "--steps", "12", "--repeats", "1"]
    return run_bench("tp8", size, tmp_path_factory.mktemp("bench"))


def rows(bench: Bench) -> list[tuple[str, str, dict[str, Any]]]:
    return runs.rows(bench.results["modes"])


def test_every_mode_is_measured_with_every_workload(bench: Bench) -> None:
    measured = [(mode, name) for mode, name, _ in rows(bench)]

    assert measured == [(mode, name) for mode in STEPS for name in ("1", "8", "32", "mixed")]
    for _, _, row in rows(bench):
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["tokens_per_s"] > 0 and row["launch_us_per_operator"] > 0
        assert {"schedule", "message", "inputs", "sample", "result"} < set(row["stages_us"])
        assert len(row["rounds_step_ms_p50"]) == 1


def test_all_modes_give_the_same_tokens(bench: Bench) -> None:
    assert [row["differing_requests"] for _, _, row in rows(bench)] == [0] * 12
    assert {row["requests"] for _, name, row in rows(bench) if name == "32"} == {32}


def test_graph_modes_replay_and_the_eager_one_does_not(bench: Bench) -> None:
    for mode, _, row in rows(bench):
        assert set(row["steps"]) == STEPS[mode]
        assert (row["update_us_per_layer"] is not None) == (mode == "FULL")
    for mode, found in bench.results["modes"].items():
        assert (sum(bucket["replays"] for bucket in found["buckets"]) > 0) == (mode != "NONE")
        assert (found["workloads"]["mixed"]["padded_fraction"] > 0) == (mode != "NONE")


def test_the_pool_of_one_rank_alone_is_that_of_the_deployment(bench: Bench) -> None:
    for mode in ("PIECEWISE", "FULL"):
        pool = bench.results["modes"][mode]["pool"]
        assert pool["shared"] == pool["deployment"]
        assert pool["needed_by_largest"] <= pool["shared"] < pool["separate"]
        assert len(pool["alone"]) == len(bench.results["modes"][mode]["buckets"])


def test_every_output_says_what_ran_it_and_that_it_is_no_figure_of_an_npu(bench: Bench) -> None:
    assert_says_what_ran_it(bench)
