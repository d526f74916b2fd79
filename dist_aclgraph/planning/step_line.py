"""Models the time of an eager step as a linear function of the step's number of tokens. The
function is fitted to measured steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

KEPT = 1 - 1 / 200  # Each new step multiplies the weight of earlier steps by this factor.
# If the variance of the steps' sizes, divided by the mean of their squares, is at most ONE_SIZE,
# the slope is 0.
ONE_SIZE = 1e-9


class StepLine(NamedTuple):
    """A step takes ``base_s`` seconds, plus ``token_s`` seconds for each token."""

    base_s: float
    token_s: float

    def at(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


class LineFit:
    """Fits a line to measured steps by least squares. Older steps have less weight than newer
    steps.

    Only one thread may call ``add``. Any thread may call ``line``.
    """

    def __init__(self) -> None:
        self.count = 0
        # Weighted sums of: 1, tokens, seconds, tokens squared, tokens x seconds.
        self._sums = np.zeros(5)

    def add(self, num_tokens: int, seconds: float) -> None:
        step = (1, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._sums = KEPT * self._sums + step
        self.count += 1

    def line(self) -> StepLine:
        """Return the fitted line. Both values of the line are zero or positive.

        Call this only after at least one step was added.
        """
        weight, tokens, seconds, squares, products = self._sums.tolist()
        spread = weight * squares - tokens**2
        slope = 0.0
        if spread > ONE_SIZE * weight * squares:
            slope = (weight * products - tokens * seconds) / spread
        slope = min(max(0.0, slope), seconds / tokens)
        return StepLine((seconds - slope * tokens) / weight, slope)
