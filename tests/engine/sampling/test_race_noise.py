"""The random numbers for sampling have the right distribution. The tokens compete: the token with
the smallest number is sampled.

The numbers depend only on the seed, the position and the token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.sampling.race_noise import RaceNoise, make_keys, mix_seeds

VOCAB = 512


def keys_of(seeds: object, positions: object) -> np.ndarray:
    return make_keys(mix_seeds(np.asarray(seeds, np.int64)), np.asarray(positions, np.int32))


@pytest.fixture
def noise(npu: Any) -> RaceNoise:
    return RaceNoise(VOCAB, lambda array: torch.from_numpy(array).to(npu.device))


def draw(noise: RaceNoise, npu: Any, keys: np.ndarray) -> np.ndarray:
    """Return, for each key, its exponentially distributed numbers, [n, vocab]."""
    column = torch.from_numpy(np.ascontiguousarray(keys)).to(npu.device).unsqueeze(-1)
    return noise.log_exponentials(column).cpu().double().exp().numpy()


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_a_key_does_not_depend_on_its_neighbours(seed: int, position: int) -> None:
    together = keys_of([3, seed, 5], [10, position, 12])

    assert together[1] == keys_of([seed], [position])[0]


def test_keys_of_one_seed_are_uniform() -> None:
    counts, _ = np.histogram(keys_of([5] * 50_000, range(50_000)), bins=50, range=(-(2**31), 2**31))

    assert ((counts - 1000) ** 2 / 1000).sum() < 100  # chi-square, 49 degrees, p = 1e-5


def test_keys_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    n = 20_000
    base = keys_of([1] * n, range(n))

    for other in (keys_of([2] * n, range(n)), keys_of([1] * n, range(1, n + 1))):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


@pytest.mark.parametrize("axis", ["keys of one token", "tokens of one key"])
def test_numbers_are_exponential(noise: RaceNoise, npu: Any, axis: str) -> None:
    numbers = draw(noise, npu, keys_of([7] * 4000, range(4000)))
    sample = numbers[:, 3] if axis == "keys of one token" else numbers[:40].ravel()

    edges = -np.log1p(-np.linspace(0, 1, 51)[:-1])  # intervals with equal probability
    counts, _ = np.histogram(sample, bins=[*edges, np.inf])

    expected = len(sample) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square, 49 degrees, p = 1e-5


def test_the_smallest_numbers_are_spread_evenly(noise: RaceNoise, npu: Any) -> None:
    """The token with the smallest number wins, so small numbers must have many different values."""
    numbers = draw(noise, npu, keys_of([7] * 8000, range(8000))).ravel()

    least = np.sort(numbers)[:2000]

    assert len(np.unique(least)) > 1990
    counts, _ = np.histogram(least, bins=20, range=(0, 2000 / len(numbers)))
    assert ((counts - 100) ** 2 / 100).sum() < 60  # chi-square, 19 degrees, p = 1e-5


def test_numbers_of_two_tokens_and_of_two_keys_are_uncorrelated(noise: RaceNoise, npu: Any) -> None:
    numbers = draw(noise, npu, keys_of([7] * 4000, range(4000)))

    by_token = np.corrcoef(numbers[:, :64].T) - np.eye(64)
    by_key = np.corrcoef(numbers[:64]) - np.eye(64)

    assert np.abs(by_token).max() < 5 / np.sqrt(4000)
    assert np.abs(by_key).max() < 5 / np.sqrt(VOCAB)


def test_all_orders_of_three_tokens_are_equally_probable(noise: RaceNoise, npu: Any) -> None:
    """If the numbers of three tokens are independent, all six orders are equally probable."""
    numbers = draw(noise, npu, keys_of([9] * 12_000, range(12_000)))

    for first in range(0, 60, 3):
        orders = np.argsort(numbers[:, first : first + 3], axis=1)
        counts = np.bincount(orders @ np.array([9, 3, 1]), minlength=27)
        counts = counts[counts > 0]
        assert len(counts) == 6
        assert ((counts - 2000) ** 2 / 2000).sum() < 31  # chi-square, 5 degrees, p = 1e-5


@pytest.mark.parametrize("key", [-(2**31), -1, 0, 1, 2**31 - 1])
def test_every_key_gives_finite_numbers(noise: RaceNoise, npu: Any, key: int) -> None:
    numbers = draw(noise, npu, np.array([key], np.int32))

    assert np.isfinite(numbers).all()
    assert (numbers > 0).all()
