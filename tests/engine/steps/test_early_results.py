"""A step's result is reported before the device has computed the step's drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.graphs.captured_graph import CapturedGraph
from dist_aclgraph.steps.step import RankBatch, RankPlan, RowStart, StepResult
from tests.engine.runners import GREEDY, make_runner, run_step
from tests.plans import make_plan

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
K, PATIENCE_S = 2, 30.0


@pytest.fixture
def runner(npu: Any) -> Any:
    plan = make_plan(K + 1, query_len=K + 1, max_num_seqs=1)
    runner = make_runner(npu, DEMO, 1, plan.capture_order, K)
    for graph in plan.capture_order:
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    runner.graph = plan.capture_order[0]
    return runner


def prompt() -> RankPlan:
    start = RowStart(0, pack_ints([1, 2, 3]), pack_ints([1]), GREEDY)
    return RankPlan(1, 1, 1, None, 0, RankBatch(pack_ints([0, 0, 3, 1]), started=(start,)))


def decoding(graph: Any, first: StepResult) -> RankPlan:
    appended = [x for token in unpack_ints(first.token_ids) for x in (0, int(token))]
    records = pack_ints([0, 3, K + 1, K + 1])
    return RankPlan(1, 2, 1, graph, 0, RankBatch(records, pack_ints(appended)))


def test_a_replay_is_read_while_its_drafts_stand_before_attention(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_step(runner, prompt())
    update, held = runner._replays.update, list[CapturedGraph]()

    def hold_drafts(graph: CapturedGraph, between: Callable[[], None]) -> None:
        is_decoder = graph.num_tasks > K
        if is_decoder:
            update(graph, between)
        else:
            held.append(graph)

    monkeypatch.setattr(runner._replays, "update", hold_drafts)
    runner.launch(decoding(runner.graph, first), 0, lambda result: None)
    deadline_s = time.monotonic() + PATIENCE_S
    [flight] = runner._flights._flights
    while not (is_here := runner._output.is_here(flight.coming)):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    for graph in held:
        update(graph, lambda: None)

    assert is_here
    assert len(held) == 1
    assert len(unpack_ints(runner.finish().token_ids)) >= 1


def test_an_eager_steps_result_is_sent_before_drafts_are_made(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    for name, owner, method in (
        ("result", runner._output, "queue"),
        ("drafts", runner._drafts, "propose_mixed"),
    ):
        call = getattr(owner, method)

        def noted(*arguments: Any, name: str = name, call: Any = call) -> Any:
            order.append(name)
            return call(*arguments)

        monkeypatch.setattr(owner, method, noted)
    first = run_step(runner, prompt())
    run_step(runner, decoding(None, first))

    assert order == ["result", "drafts"] * 2
