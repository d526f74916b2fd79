"""The number of restarts within an hour is limited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.restarts import (
    FIRST_PAUSE_S,
    HOUR_S,
    LONGEST_PAUSE_S,
    SHORTEST_START_S,
    RestartBudget,
    StartLimit,
)


@given(st.lists(st.floats(0, 2000)), st.integers(0, 4))
def test_no_hour_has_more_restarts_than_are_allowed(gaps: list[float], per_hour: int) -> None:
    budget, now_s, taken = RestartBudget(per_hour), 0.0, []
    for gap in gaps:
        now_s += gap
        recent = [at for at in taken if at > now_s - HOUR_S]
        allowed = budget.spend(now_s)
        assert allowed == (len(recent) < per_hour)
        if allowed:
            taken.append(now_s)


@given(st.integers(1, 30))
def test_pauses_between_failing_attempts_grow_up_to_a_limit(count: int):
    budget, now_s, pauses = RestartBudget(1), 0.0, []
    for _ in range(count):
        budget.failed(now_s)
        pause_s = next(p for p in range(1000) if budget.is_due(now_s + p))
        pauses.append(pause_s)
        now_s += pause_s

    assert pauses == sorted(pauses)
    assert pauses[0] == FIRST_PAUSE_S and pauses[-1] <= LONGEST_PAUSE_S

    budget.succeeded()
    budget.failed(now_s)
    assert budget.is_due(now_s + FIRST_PAUSE_S)


@given(st.lists(st.floats(0.0, 300.0), min_size=1), st.floats(1.0, 600.0), st.integers(0, 8))
def test_a_start_may_take_longer_after_each_start_that_took_too_long(
    times: list[float], longest_s: float, num_exceeded: int
) -> None:
    limit = StartLimit()
    assert limit.seconds(longest_s) == longest_s
    for took_s in times:
        limit.note(took_s)

    limits = [limit.seconds(longest_s)]
    for _ in range(num_exceeded):
        limit.exceeded()
        limits.append(limit.seconds(longest_s))

    assert limits == sorted(limits)
    assert limits[0] >= min(longest_s, SHORTEST_START_S, 2 * max(times))
    assert limits[-1] <= longest_s
    if num_exceeded == 8:
        assert limits[-1] == longest_s

    limit.note(0.0)
    assert limit.seconds(longest_s) == limits[0]


def test_a_copy_of_a_budget_on_another_clock_has_the_same_restarts_left() -> None:
    budget, copy = RestartBudget(3), RestartBudget(3)
    for now_s in (0.0, 100.0):
        budget.spend(now_s)

    copy.adopt(budget.ages_s(200.0), now_s=5000.0)

    assert (budget.num_left(200.0), copy.num_left(5000.0)) == (1, 1)
    assert copy.num_left(5000.0 + HOUR_S - 200.0) == 2
    assert copy.num_left(5000.0 + HOUR_S - 100.0) == 3
