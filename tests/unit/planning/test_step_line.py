"""A straight line is fitted to the times of eager steps: time as a function of the number of
tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.planning.step_line import LineFit, StepLine


def fit(*steps: tuple[int, float]) -> LineFit:
    found = LineFit()
    for num_tokens, seconds in steps:
        found.add(num_tokens, seconds)
    return found


def test_steps_on_a_line_give_that_line() -> None:
    line = StepLine(0.01, 0.0005)

    found = fit(*[(n, line.at(n)) for n in (8, 512, 30, 100)])

    assert found.count == 4
    assert found.line() == pytest.approx(line)


def test_steps_of_one_size_give_their_mean() -> None:
    assert fit((7, 0.2), (7, 0.2)).line() == pytest.approx(StepLine(0.2, 0.0))


def test_old_steps_lose_weight() -> None:
    found = fit(*[(8, 1.0), (16, 1.0)] * 10, *[(8, 0.1), (16, 0.2)] * 1000)

    assert found.line().at(16) == pytest.approx(0.2, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 10)), min_size=1, max_size=30))
def test_no_step_takes_negative_time(steps: list[tuple[int, float]]) -> None:
    base_s, token_s = fit(*steps).line()

    assert base_s >= -1e-9 and token_s >= 0
