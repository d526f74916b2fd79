"""Laws of the number of groups that autoscaling wants.

The number stays within its limits, changes only after a delay, and does not oscillate under a
constant demand.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import AutoscaleConfig, make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.autoscale import Autoscaler, Demand

ROWS = 10


def make(**keys: float) -> Autoscaler:
    given = {"min_groups": 1, "max_groups": 4, "target_waiting": 5, "up_s": 10, "down_s": 60}
    return Autoscaler(AutoscaleConfig(**{**given, **keys}))


def spread(open_requests: int, groups: int) -> Demand:
    """Return the demand of ``open_requests``. If the groups have too few rows, the remaining
    requests wait.
    """
    running = min(open_requests, ROWS * groups)
    return Demand(groups, running, open_requests - running, ROWS)


def test_a_group_is_added_after_enough_has_waited_for_long_enough():
    scaler = make()

    assert [scaler.decide(t, spread(17, 1)) for t in (0.0, 9.0, 10.0)] == [1, 1, 2]
    # The next group is added only after the same delay has passed once more.
    assert [scaler.decide(t, spread(40, 2)) for t in (11.0, 20.0, 21.0)] == [2, 2, 3]


def test_a_moment_without_waiting_begins_the_time_anew():
    scaler = make()

    assert scaler.decide(0, spread(20, 1)) == 1
    assert scaler.decide(9, spread(0, 1)) == 1
    assert scaler.decide(12, spread(20, 1)) == 1
    assert scaler.decide(22, spread(20, 1)) == 2


def test_a_group_is_given_back_after_a_long_time_with_room():
    scaler = make()

    assert [scaler.decide(t, spread(5, 2)) for t in (0.0, 59.0, 60.0)] == [2, 2, 1]


def test_groups_that_are_missing_are_not_asked_for_again():
    scaler = make(min_groups=3)

    busy = [Demand(1, ROWS, 50, ROWS, missing=2) for _ in range(3)]
    assert [scaler.decide(t, each) for t, each in zip((0, 10, 20), busy, strict=True)] == [1, 1, 1]
    assert scaler.decide(30, Demand(1, 0, 0, ROWS, missing=0)) == 3


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 200)), max_size=60),
    st.integers(1, 3),
    st.integers(3, 6),
)
def test_the_number_stays_within_its_bounds_and_changes_by_one(steps, low, high):
    scaler, now_s, groups = make(min_groups=low, max_groups=high), 0.0, low
    for pause_s, count in steps:
        now_s += pause_s
        wanted = scaler.decide(now_s, spread(count, groups))
        assert low <= wanted <= high
        assert abs(wanted - groups) <= 1
        groups = wanted


@given(st.integers(0, 100), st.integers(1, 6))
def test_a_steady_demand_comes_to_rest(count, groups):
    scaler, seen = make(max_groups=6), []
    for now_s in range(0, 2000, 5):
        groups = scaler.decide(float(now_s), spread(count, groups))
        seen.append(groups)

    assert len(set(seen[200:])) == 1


def test_bounds_must_be_in_order():
    with pytest.raises(ConfigError, match="max_groups"):
        make_config({"model": "m", "serve": {"autoscale": {"min_groups": 3, "max_groups": 2}}})
