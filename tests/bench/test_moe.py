"""The bench of experts runs on four ranks, and measures its variants in alternation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import runs
from tests.bench.runs import Bench, assert_says_what_ran_it, run_bench

pytestmark = [pytest.mark.cluster, pytest.mark.bench]

MODEL = Path(__file__).parents[2] / "models" / "tiny-deepseek"
WORKLOADS = ("1", "16", "mixed")
NUM_DRAFTS = {"base": 1, "no drafts": 0, "two drafts": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    others = ",".join(name for name in NUM_DRAFTS if name != "base")
    size = ["--model", str(MODEL), "--steps", "12", "--repeats", "1", "--variants", others]
    return run_bench("moe", size, tmp_path_factory.mktemp("bench"))


def rows(bench: Bench) -> list[tuple[str, str, dict[str, Any]]]:
    return runs.rows(bench.results["variants"])


def test_every_variant_is_measured_with_every_workload(bench: Bench) -> None:
    measured = [(name, workload) for name, workload, _ in rows(bench)]

    assert measured == [(name, workload) for name in NUM_DRAFTS for workload in WORKLOADS]
    for _, _, row in rows(bench):
        assert row["step_ms_p50"] > 0 and row["tokens_per_s"] > 0
        assert len(row["step_ratio"]["rounds"]) == len(row["rate_ratio"]["rounds"]) == 1
    for row in bench.results["variants"]["base"]["workloads"].values():
        assert row["step_ratio"]["median"] == row["rate_ratio"]["median"] == 1


def test_acceptance_of_each_draft_makes_the_tokens_of_a_step(bench: Bench) -> None:
    for name, _, row in rows(bench):
        accepted = row["acceptance"]
        assert len(accepted) == NUM_DRAFTS[name]
        assert accepted == sorted(accepted, reverse=True) and all(0 <= a <= 1 for a in accepted)
        assert 1 <= row["tokens_per_step"] <= 1 + NUM_DRAFTS[name]
        assert (row["tokens_per_step"] == 1) == (name == "no drafts")


def test_experts_of_all_ranks_work_and_no_step_is_run_again(bench: Bench) -> None:
    for _, _, row in rows(bench):
        assert len(row["expert_tokens"]) == 4 and min(row["expert_tokens"]) > 0
        assert 1 <= row["imbalance"] <= 4
        assert row["reruns"] == 0


def test_decoding_replays_and_prompts_between_run_eagerly(bench: Bench) -> None:
    for _, workload, row in rows(bench):
        assert set(row["steps"]) == ({"full", "eager"} if workload == "mixed" else {"full"})


def test_every_output_says_what_ran_it_and_that_it_is_no_figure_of_an_npu(bench: Bench) -> None:
    assert_says_what_ran_it(bench)
