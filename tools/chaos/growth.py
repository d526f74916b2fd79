"""Decides whether a service uses more and more resources. The decision depends on the slope of
samples over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

HOUR_S = 3600.0
WARM_UP = 0.2  # this fraction of the samples, at the beginning, is ignored for the slope
FLAT_SHARE = 0.05  # a value is flat if its growth over the run is below this fraction of its median
# A value is also flat if it grows by less than this amount over the run.
FLAT_AMOUNTS = {"MiB": 16.0, "files": 16.0, "threads": 8.0, "processes": 1.0}
COLUMNS = ("resource", "unit", "first", "median", "last", "growth per hour", "flat")


@dataclass(frozen=True)
class Sample:
    """The resources that a service uses at one time. No request runs at this time.

    Attributes:
        values: the used amounts. A key is (resource, unit), e.g. ("ray::Engine", "MiB").
    """

    at_s: float
    values: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Growth:
    """How one resource changed over a run."""

    resource: str
    unit: str
    first: float
    median: float
    last: float
    per_hour: float
    is_flat: bool

    def cells(self) -> list[str]:
        numbers = [f"{x:.0f}" for x in (self.first, self.median, self.last)]
        verdict = "yes" if self.is_flat else "NO"
        return [self.resource, self.unit, *numbers, f"{self.per_hour:+.1f}", verdict]


def growths(samples: Sequence[Sample]) -> Iterator[Growth]:
    """Yield the growth of each resource. If a sample has no value for a resource, the value counts
    as 0.

    Args:
        samples: at least two samples, in the order of their times.
    """
    names = sorted({name for sample in samples for name in sample.values})
    warm = samples[min(int(WARM_UP * len(samples)), len(samples) - 2) :]
    times_s = [sample.at_s for sample in warm]
    for resource, unit in names:
        values = [sample.values.get((resource, unit), 0.0) for sample in samples]
        late = values[-len(warm) :]
        slope = linear_regression(times_s, late).slope
        growth = slope * (times_s[-1] - times_s[0])
        allowed = max(FLAT_SHARE * median(late), FLAT_AMOUNTS[unit])
        yield Growth(
            resource,
            unit,
            values[0],
            median(values),
            values[-1],
            slope * HOUR_S,
            growth <= allowed,
        )


def sums_over_time(samples: Sequence[Sample], count: int) -> Iterator[list[str]]:
    """Yield at most ``count`` lines. Each line contains the minutes since the first sample, and the
    sum over all resources for each unit.
    """
    step = max(1, -(-len(samples) // count))
    for sample in samples[::step]:
        minutes = (sample.at_s - samples[0].at_s) / 60
        yield [f"{minutes:.0f}", *(f"{_sum(sample, unit):.0f}" for unit in FLAT_AMOUNTS)]


def _sum(sample: Sample, wanted: str) -> float:
    return sum(value for (_, unit), value in sample.values.items() if unit == wanted)
