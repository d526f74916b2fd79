"""Chosen graph sizes have the lowest cost. The choice is fast enough for a running service."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.buckets import trim_sizes
from dist_aclgraph.planning.choice import choices, expected_cost, step_costs
from tests.plans import choose


def zero_or(lowest: float, highest: float) -> st.SearchStrategy[float]:
    """Draw zero or a number in the range. Numbers near zero are left out, because tiny products
    (1e-320) would not be exact.
    """
    return st.just(0.0) | st.floats(lowest, highest)


weights = st.dictionaries(st.integers(1, 60), zero_or(1e-6, 1000), max_size=30)


@st.composite
def priced_sizes(draw, max_size: int = 8) -> tuple[list[int], list[float]]:
    sizes = sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=max_size)))
    by_tokens = [float(size) for size in sizes]
    measured = st.lists(zero_or(1e-6, 50), min_size=len(sizes), max_size=len(sizes))
    return sizes, draw(st.one_of(st.just(by_tokens), measured))


@given(priced_sizes(), weights, st.integers(1, 9))
def test_no_other_set_of_sizes_costs_less(priced, weights, max_buckets) -> None:
    sizes, costs = priced
    cost_of = dict(zip(sizes, costs, strict=True))

    found = choose(sizes, weights, costs, max_buckets)

    others = [
        (*rest, sizes[-1])
        for k in range(max_buckets)
        for rest in combinations(sizes[:-1], min(k, len(sizes) - 1))
    ]
    best = min(expected_cost(other, weights, cost_of) for other in others)
    assert expected_cost(found, weights, cost_of) == pytest.approx(best)
    assert found in others


@given(priced_sizes(30), weights, st.integers(1, 30))
def test_every_number_of_buckets_has_its_cost_at_once(priced, weights, max_buckets) -> None:
    sizes, costs = priced
    cost_of = dict(zip(sizes, costs, strict=True))

    found = choices(sizes, weights, costs, max_buckets)

    assert found.costs[0] == float("inf") and found.buckets(0) == ()
    for k in range(1, len(found.costs)):
        buckets = found.buckets(k)
        assert len(buckets) <= k and buckets[-1] == sizes[-1]
        assert found.costs[k] == pytest.approx(expected_cost(buckets, weights, cost_of))
        assert found.costs[k] <= found.costs[k - 1]
        uniform = trim_sizes(sizes, k)
        assert found.costs[k] <= expected_cost(uniform, weights, cost_of) * (1 + 1e-9)


def test_a_bucket_that_saves_nothing_is_left_out() -> None:
    assert choose([1, 2, 4, 8], {2: 5.0, 8: 1.0}, [1, 2, 4, 8], 4) == (2, 8)
    assert choose([1, 2, 4, 8], {}, [1, 2, 4, 8], 4) == (8,)


def test_a_step_that_takes_as_long_is_not_worth_a_bucket() -> None:
    by_time = step_costs([1, 2, 4, 8], {1: 5.0, 4: 5.0, 8: 9.0})

    assert choose([1, 2, 4, 8], {1: 1.0, 2: 1.0, 8: 1.0}, by_time, 3) == (2, 8)


SECONDS = st.dictionaries(st.integers(1, 99), st.floats(0.001, 9), min_size=1, max_size=5)


@given(SECONDS)
def test_measured_steps_keep_their_time_and_others_lie_between(seconds) -> None:
    sizes = sorted(seconds)
    seconds = dict(zip(sizes, sorted(seconds.values()), strict=True))

    assert step_costs(sizes, seconds) == pytest.approx([seconds[size] for size in sizes])
    low, high = min(seconds.values()), max(seconds.values())
    inside = range(sizes[0], sizes[-1] + 1)
    assert all(low - 1e-9 <= cost <= high + 1e-9 for cost in step_costs(inside, seconds))
    assert step_costs([2 * sizes[-1]], seconds) == pytest.approx([2 * seconds[sizes[-1]]])


@given(SECONDS)
def test_noise_of_measured_steps_makes_no_bucket_dearer_than_a_larger_bucket(seconds) -> None:
    sizes = sorted(seconds)
    costs = step_costs(sizes, seconds)
    cost_of = dict(zip(sizes, costs, strict=True))

    assert costs == sorted(costs)
    assert all(cost <= seconds[size] for size, cost in cost_of.items())
    weights = dict.fromkeys(sizes, 1.0)
    best = choices(sizes, weights, costs, len(sizes)).costs[-1]
    assert best == pytest.approx(expected_cost(sizes, weights, cost_of)), "all sizes are best"


def test_four_times_as_many_sizes_take_at_most_the_square_as_long() -> None:
    def processor_s(num_sizes: int) -> float:
        sizes = list(range(1, num_sizes + 1))
        weights = {n: 1.0 / n for n in sizes}
        start_s = time.process_time()
        found = choices(sizes, weights, sizes, 64)
        took_s = time.process_time() - start_s
        assert len(found.buckets(64)) == 64
        return took_s

    few_s = min(processor_s(250) for _ in range(5))
    many_s = min(processor_s(1000) for _ in range(3))
    assert many_s < 2.5 * 4**2 * few_s  # quadratic time; cubic time would give 4**3
