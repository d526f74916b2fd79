from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.random_numbers import uniforms


def draw(seeds: object, positions: object) -> np.ndarray:
    return uniforms(np.asarray(seeds, np.int64), np.asarray(positions, np.int32))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_a_number_lies_in_the_half_open_unit_interval(seed: int, position: int) -> None:
    [number] = draw([seed], [position])

    assert 0.0 <= number < 1.0


def test_numbers_of_one_seed_are_uniform() -> None:
    numbers = draw([5] * 50_000, range(50_000))

    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))

    assert ((counts - 1000) ** 2 / 1000).sum() < 100  # 49 degrees of freedom: 1e-5


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    n = 20_000
    base = draw([1] * n, range(n))

    for other in (draw([2] * n, range(n)), draw([1] * n, range(1, n + 1))):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


def test_numbers_do_not_depend_on_their_neighbours() -> None:
    together = draw([3, 4, 5], [10, 11, 12])

    assert together[1] == draw([4], [11])[0]
