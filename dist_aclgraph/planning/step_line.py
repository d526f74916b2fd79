"""The time of steps without a graph: a line over their tokens, fitted to measured steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

KEPT = 1 - 1 / 200  # weight of earlier steps, at each further step
ONE_SIZE = 1e-9  # relative spread of sizes below which a slope would be rounding alone


class Line(NamedTuple):
    """Seconds of a step: those of any step, and those of each of its tokens."""

    base_s: float
    token_s: float

    def at(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


class LineFit:
    """Fits a line to measured steps by least squares; old steps lose weight slowly.

    One thread adds; any thread may read.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums = np.zeros(5)  # of weights, tokens, seconds, tokens squared, tokens x seconds

    def add(self, num_tokens: int, seconds: float) -> None:
        step = (1, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._sums = KEPT * self._sums + step
        self.count += 1

    def line(self) -> Line:
        """Return the line, neither part of which is negative; at least one step was added."""
        weight, tokens, seconds, squares, products = self._sums.tolist()
        spread = weight * squares - tokens**2
        slope = 0.0
        if spread > ONE_SIZE * weight * squares:
            slope = (weight * products - tokens * seconds) / spread
        slope = min(max(0.0, slope), seconds / tokens)
        return Line((seconds - slope * tokens) / weight, slope)
