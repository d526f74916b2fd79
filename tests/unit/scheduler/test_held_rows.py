"""While a request waits until its grammar is compiled, the other requests of its group run."""

from __future__ import annotations

import pytest

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.errors import WorkerError
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import StepPlan, StepResult
from tests.unit.scheduler.test_scheduler import make_request, make_scheduler, records

FREE, FORM = 0, 1  # rows


def make_both(**options: int) -> Scheduler:
    """Return a scheduler with two requests, one with a grammar and one without."""
    scheduler = make_scheduler(**options)
    for name in ("free", "form"):
        scheduler.add(make_request(name, ignore_eos=True, max_tokens=100))
    return scheduler


def land(scheduler: Scheduler, plan: StepPlan | None, *results: dict[str, list[int]]) -> list[str]:
    """Give the scheduler one result of each worker for a step; return the requests that got a
    token.
    """
    assert plan is not None
    tokens = [1] * sum(record[3] for record in records(plan))
    outputs = scheduler.update(
        [
            StepResult(
                0,
                plan.step,
                rank,
                pack_ints(tokens) if rank == 0 else b"",
                unmasked=pack_ints(result.get("unmasked", [])),
                compiling=pack_ints(result.get("compiling", [])),
            )
            for rank, result in enumerate(results)
        ]
    )
    return [delta.request_id for delta in outputs]


def rows_of(plan: StepPlan | None) -> list[int]:
    return [record[0] for record in records(plan)]


def test_a_request_without_a_mask_gets_no_token_and_runs_when_its_grammar_is_compiled() -> None:
    scheduler = make_both()
    prompts = scheduler.schedule()
    assert land(scheduler, prompts, {"unmasked": [FORM], "compiling": [FORM]}) == ["free"]

    for number in range(5):
        plan = scheduler.schedule()
        assert rows_of(plan) == [FREE]
        assert plan is not None
        # In the first of these steps, the workers start the row again, because the row's penalties
        # may have counted a wrong token.
        assert [start.row for start in plan.batches[0].started] == [FORM] * (number == 0)
        compiling = [FORM] if number < 4 else []
        assert land(scheduler, plan, {"compiling": compiling}) == ["free"]

    assert prompts is not None
    prompt, again = records(prompts)[FORM], records(scheduler.schedule())
    assert again[1] == prompt


def test_the_step_in_flight_gives_the_held_request_no_token_either() -> None:
    scheduler = make_both()
    first, second = scheduler.schedule(), scheduler.schedule()
    assert rows_of(second) == [FREE, FORM]

    assert land(scheduler, first, {"unmasked": [FORM], "compiling": [FORM]}) == ["free"]
    assert rows_of(scheduler.schedule()) == [FREE]
    assert land(scheduler, second, {"compiling": [FORM]}) == ["free"]
    assert rows_of(scheduler.schedule()) == [FREE]


def test_a_request_waits_for_the_slowest_of_its_ranks() -> None:
    scheduler = make_both(tp=2)
    plan = scheduler.schedule()
    assert land(scheduler, plan, {}, {"unmasked": [FORM], "compiling": [FORM]}) == ["free"]

    plan = scheduler.schedule()
    assert rows_of(plan) == [FREE]
    assert land(scheduler, plan, {"compiling": [FORM]}, {}) == ["free"]
    plan = scheduler.schedule()
    assert rows_of(plan) == [FREE]
    assert land(scheduler, plan, {}, {}) == ["free"]
    assert rows_of(scheduler.schedule()) == [FREE, FORM]


def test_steady_steps_stop_at_a_request_whose_answer_begins_after_its_reasoning() -> None:
    scheduler = make_both()
    for _ in range(4):
        assert land(scheduler, scheduler.schedule(), {"compiling": [FORM]}) == ["free", "form"]
    plan = scheduler.schedule()
    assert land(scheduler, plan, {"unmasked": [FORM], "compiling": [FORM]}) == ["free"]

    plan = scheduler.schedule()
    assert rows_of(plan) == [FREE]
    assert plan is not None
    (start,) = plan.batches[0].started
    assert unpack_ints(start.token_ids).tolist() == [0, 1, 2, 3, 1, 1, 1, 1]
    land(scheduler, plan, {})
    plan = scheduler.schedule()
    assert records(plan) == [[FREE, 9, 1, 1], [FORM, 7, 1, 1]]


def test_a_request_alone_asks_again_with_every_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("form"))
    for _ in range(3):
        plan = scheduler.schedule()
        assert records(plan) == [[0, 0, 4, 1]]
        assert land(scheduler, plan, {"unmasked": [0], "compiling": [0]}) == []
    assert land(scheduler, scheduler.schedule(), {}) == ["form"]


def test_a_held_request_can_be_aborted() -> None:
    scheduler = make_both()
    land(scheduler, scheduler.schedule(), {"unmasked": [FORM], "compiling": [FORM]})
    scheduler.abort("form")

    plan = scheduler.schedule()
    assert plan is not None
    assert plan.batches[0].started == ()
    land(scheduler, plan, {"compiling": [FORM]})
    scheduler.abort("free")
    assert scheduler.schedule() is None
    assert scheduler.ranks[0].pool.num_used == 0


def test_a_result_that_names_a_missing_sample_changes_nothing() -> None:
    scheduler = make_both()
    plan = scheduler.schedule()
    with pytest.raises(WorkerError, match="no masks of requests"):
        land(scheduler, plan, {"unmasked": [2]})
