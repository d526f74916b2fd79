"""The workloads of benches, and the calculations with the results of benches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.workload import (
    Delivery,
    decode_workload,
    mean_stages,
    median_stages,
    mixed_workload,
    padded_fraction,
    paired_ratio,
    percentile,
    whole_steps,
)
from dist_aclgraph.errors import DistAclGraphError

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(values, st.floats(0, 100))
def test_a_percentile_is_one_of_the_values_and_enough_are_not_above_it(
    found: list[float], percent: float
) -> None:
    result = percentile(found, percent)

    assert result in found
    assert sum(value <= result for value in found) >= len(found) * percent / 100 - 1e-9


@given(values)
def test_percentiles_run_from_the_smallest_to_the_largest(found: list[float]) -> None:
    assert percentile(found, 0) == min(found)
    assert percentile(found, 100) == max(found)
    assert percentile(found, 50) <= percentile(found, 99)


def test_the_99th_of_a_hundred_leaves_one_above() -> None:
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 101), 50) == 50


def test_padding_is_a_share_of_all_replayed_tokens() -> None:
    assert padded_fraction(3, 9) == 0.25
    assert padded_fraction(0, 5) == 0.0


def test_nothing_replayed_is_nothing_padded() -> None:
    assert padded_fraction(0, 0) == 0.0


def test_a_ratio_compares_within_each_round() -> None:
    # In this example, the machine becomes ten times slower in each round. So a ratio of medians
    # over all rounds would be meaningless.
    assert paired_ratio([10.0, 100.0, 1000.0], [5.0, 50.0, 500.0]) == 2.0


def test_a_ratio_needs_as_many_rounds_of_both() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_stages_are_means_over_the_steps_of_all_modes() -> None:
    timings = {"eager.steps": 1, "eager.sample": 40.0, "full.steps": 3, "full.sample": 60.0}

    assert mean_stages({**timings, "full.replay": 8.0, "piecewise.steps": 0}) == (
        {"sample": 25.0, "replay": 2.0},
        {"eager": 1, "full": 3},
    )


def test_the_median_over_runs_forgets_the_one_that_stood_still() -> None:
    runs = [{"sample": 5.0}, {"sample": 900.0, "update": 1.0}, {"sample": 7.0, "update": 2.0}]

    assert median_stages(runs) == {"sample": 7.0, "update": 1.0}


def test_the_first_request_of_a_batch_ends_first() -> None:
    first, *others = decode_workload(8, 16, 20, 100)

    assert first.max_tokens == 20
    assert all(other.max_tokens > 20 and other.at_token == 0 for other in others)


@given(st.permutations(range(4)), st.integers(2, 20), st.integers(1, 3))
def test_every_request_counts_once_in_every_whole_step(
    places: list[int], num_steps: int, num_tokens: int
) -> None:
    # In every step, each of four requests gets one delivery. Within a step, there is one delivery
    # every 1/1000 of a step.
    deliveries = [
        [Delivery(step + place / 1000, num_tokens) for step in range(num_steps)] for place in places
    ]
    begin_s = max(each[0].at_s for each in deliveries)

    for index, place in enumerate(places):
        steps_s, counts = whole_steps(deliveries, begin_s, index)
        gaps = len(steps_s) - 1

        assert gaps == num_steps - (1 if place == 3 else 2)
        assert counts == [num_tokens] * 4 * gaps


@given(st.integers(5, 100))
def test_requests_that_come_later_come_while_the_first_decodes(steps: int) -> None:
    arrivals = mixed_workload(4, 8, steps, 100)
    later = [arrival.at_token for arrival in arrivals if arrival.at_token]

    assert later and max(later) < steps
    assert all(len(arrival.prompt) >= 1 for arrival in arrivals)


def test_workloads_are_the_same_every_time() -> None:
    assert mixed_workload(8, 16, 40, 100) == mixed_workload(8, 16, 40, 100)


def test_a_request_that_ended_too_early_is_one_sentence() -> None:
    with pytest.raises(DistAclGraphError, match="decode more tokens"):
        whole_steps([[Delivery(1.0, 1)], [Delivery(2.0, 1)]], 2.0, 0)
