"""A worker refuses a step of an unconfirmed graph plan, and a step of another rank's batch."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.worker.rank_stages import RunningRank
from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, RankDisagreementError
from dist_aclgraph.steps.step import RankBatch, RankPlan
from tests.plans import decode_graph, make_plan

DP_RANK = 3


def make_worker(version: int) -> Worker:
    worker = Worker(make_config({"model": "unused"}), epoch=1)
    worker.adopt(make_plan(1, version=version))
    worker._stage = Mock(spec=RunningRank, joined=Mock(groups=Mock(dp_rank=DP_RANK)))
    return worker


def make_step(plan_version: int, dp_rank: int = DP_RANK) -> RankPlan:
    return RankPlan(1, 5, plan_version, decode_graph(1), dp_rank, RankBatch(b""))


def test_a_step_of_the_confirmed_plan_is_accepted() -> None:
    make_worker(2).check_plan(make_step(2))


def test_a_step_of_another_plan_is_refused_with_both_versions() -> None:
    with pytest.raises(RankDisagreementError, match="names graph plan 1, this rank holds 2"):
        make_worker(2).check_plan(make_step(1))


def test_the_batch_of_another_data_parallel_rank_is_refused_with_both_ranks() -> None:
    with pytest.raises(RankDisagreementError, match="rank 2, this rank runs the batch of 3"):
        make_worker(2).check_plan(make_step(2, dp_rank=2))


def test_blocking_launches_are_refused_where_graphs_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")

    with pytest.raises(ConfigError, match="ASCEND_LAUNCH_BLOCKING is 1"):
        make_worker(1).join(0, 0, "unused")
