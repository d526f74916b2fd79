"""Restarts within an hour."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.restarts import HOUR_S, RestartBudget


@given(st.lists(st.floats(0, 2000)), st.integers(0, 4))
def test_no_hour_has_more_restarts_than_are_allowed(gaps: list[float], per_hour: int) -> None:
    budget, now_s, taken = RestartBudget(per_hour), 0.0, []
    for gap in gaps:
        now_s += gap
        recent = [at for at in taken if at > now_s - HOUR_S]
        allowed = budget.take(now_s)
        assert allowed == (len(recent) < per_hour)
        if allowed:
            taken.append(now_s)
