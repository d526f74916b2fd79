"""Memory that grows all the time is distinguished from noise, and from memory that grows only when
a run begins.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.chaos.growth import Sample, growths, sums_over_time

ENGINE = ("ray::Engine", "MiB")


def samples(value: Callable[[int], float], count: int = 50) -> list[Sample]:
    """Return samples of one process's memory, one sample for each minute."""
    return [Sample(60.0 * i, {ENGINE: value(i)}) for i in range(count)]


@pytest.mark.parametrize(
    ("value", "is_flat"),
    [
        (lambda i: 300.0, True),
        (lambda i: 300.0 + 10 * (i % 3), True),  # noise
        (lambda i: 300.0 - i, True),  # memory decreases
        (lambda i: min(300.0, 100.0 + 30 * i), True),  # memory grows only at the beginning
        (lambda i: 300.0 + i, False),
        (lambda i: 300.0 + i + 10 * (i % 3), False),
    ],
)
def test_only_a_steady_growth_counts(value: Callable[[int], float], is_flat: bool) -> None:
    [found] = growths(samples(value))

    assert found.is_flat is is_flat


def test_the_growth_is_per_hour() -> None:
    [found] = growths(samples(lambda i: 100.0 + 2 * i))

    assert found.per_hour == pytest.approx(120.0)
    assert (found.first, found.last) == (100.0, 198.0)
    assert found.cells() == ["ray::Engine", "MiB", "100", "149", "198", "+120.0", "NO"]


def test_a_resource_that_appears_late_was_zero_before() -> None:
    few = [Sample(0.0, {}), Sample(60.0, {ENGINE: 40.0})]

    [found] = growths(few)

    assert (found.first, found.last, found.is_flat) == (0.0, 40.0, False)


def test_the_sums_over_time_have_few_lines() -> None:
    lines = list(sums_over_time(samples(lambda i: float(i)), 10))

    assert len(lines) == 10
    assert lines[1][:2] == ["5", "5"]
