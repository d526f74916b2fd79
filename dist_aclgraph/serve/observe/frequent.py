"""A histogram that is fast enough to count an event for each token. The library's own histogram is
too slow for this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class FrequentHistogram(Collector):
    """Counts values by bucket. Only one thread may add values; any thread may collect them.

    Args:
        labels: the values of the histogram's labels, by name.
        bounds: upper ends of the buckets, ascending. One more bucket counts larger values.
    """

    def __init__(
        self, name: str, text: str, labels: dict[str, str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        totals = map(float, accumulate(self._counts))
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(
            tuple(self._labels.values()), list(zip(ends, totals, strict=True)), self._sum
        )
        yield family
