"""Chooses which sizes to capture. The algorithm is exact: it finds the set with the lowest cost for
the traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dist_aclgraph.planning.buckets import pad_to_bucket

# Rounding errors can make equal costs differ. So a cost is treated as lower than another cost only
# if it is below NO_GAIN times the other cost.
NO_GAIN = 1 - 1e-9
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """The best set of buckets for every number of buckets.

    Attributes:
        sizes: the sizes that may be chosen, in ascending order.
        costs: [max_buckets + 1]; element k is the lowest expected cost with at most k buckets;
            element 0 is infinite.
        counts: [max_buckets + 1]; element k is the smallest number of buckets with which the cost
            is ``costs[k]``.
        previous: [max_buckets + 1, number of sizes]; element [k, j] belongs to the best set of k
            buckets whose largest bucket is ``sizes[j]``. The element is 1 plus the index in
            ``sizes`` of the second largest bucket of this set.
    """

    sizes: tuple[int, ...]
    costs: FloatArray
    counts: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int64]

    def buckets(self, max_buckets: int) -> tuple[int, ...]:
        """Return the best set of at most ``max_buckets`` sizes, in ascending order; empty if
        ``max_buckets`` is zero.
        """
        chosen: list[int] = []
        last = len(self.sizes) - 1
        for k in range(int(self.counts[max_buckets]), 0, -1):
            chosen.append(self.sizes[last])
            last = int(self.previous[k, last]) - 1
        return tuple(reversed(chosen))


def choices(
    sizes: Sequence[int], weights: Mapping[int, float], costs: Sequence[float], max_buckets: int
) -> Choices:
    """Return the best set of buckets for every number of buckets up to ``max_buckets``.

    A batch of n tokens costs as much as a step of the smallest bucket with at least n tokens. The
    expected cost is the sum of weight times cost over all n. Batches above the largest size are not
    included, because they always run without a graph. Time: O(max_buckets * len(sizes)**2).

    Args:
        sizes: the sizes that may be chosen, in ascending order.
        weights: for each number of tokens without padding, how often batches have this number.
        costs: for each size, the cost of one step. All costs have the same unit.
    """
    up_to = _weight_up_to(sizes, weights)
    # pays[j, i]: cost of all batches above ``sizes[i - 1]`` and up to ``sizes[j]``, if they run in
    # the bucket ``sizes[j]``.
    pays = (up_to[1:, None] - up_to[None, :]) * np.asarray(costs, np.float64)[:, None]
    n = len(sizes)
    pays[np.tri(n, n + 1, 0) == 0] = np.inf
    limit = min(max_buckets, n)
    exact = np.full(limit + 1, np.inf)
    previous = np.zeros((limit + 1, n), np.int64)
    best = np.full(n + 1, np.inf)  # best[i]: lowest cost if sizes[i - 1] is the last of k buckets
    best[0] = 0.0
    total = np.empty_like(pays)
    for k in range(1, limit + 1):
        np.add(pays, best, out=total)
        previous[k] = total.argmin(axis=1)
        best = np.concatenate([[np.inf], total[np.arange(n), previous[k]]])
        exact[k] = best[n]
    counts = np.zeros(limit + 1, np.int64)
    for k in range(1, limit + 1):
        counts[k] = k if exact[k] < exact[counts[k - 1]] * NO_GAIN else counts[k - 1]
    return Choices(tuple(sizes), exact[counts], counts, previous)


def expected_cost(
    buckets: Sequence[int], weights: Mapping[int, float], costs: Mapping[int, float]
) -> float:
    """Return the expected cost of all batches that fit in a bucket; see ``choices``."""
    padded = ((weight, pad_to_bucket(tokens, buckets)) for tokens, weight in weights.items())
    return sum(weight * costs[bucket] for weight, bucket in padded if bucket is not None)


def padding_share(buckets: Sequence[int], weights: Mapping[int, float]) -> float:
    """Return the fraction of padding tokens among all replayed tokens; 0 if nothing is replayed."""
    padded = expected_cost(buckets, weights, {bucket: float(bucket) for bucket in buckets})
    reach = buckets[-1] if buckets else 0
    live = sum(weight * tokens for tokens, weight in weights.items() if tokens <= reach)
    return 1 - live / padded if padded else 0.0


def step_costs(sizes: Sequence[int], seconds: Mapping[int, float]) -> list[float]:
    """Return the cost of a step at each size: in seconds if at least one time was measured,
    otherwise in padded tokens.

    Between two measured sizes, the time is interpolated linearly. Below the smallest and above the
    largest measured size, the time is proportional to the number of tokens. A measured time can
    include pauses of the host. If a step of a larger size took less time than a step of a smaller
    size, the time of the larger size is used for both sizes.
    """
    if not seconds:
        return [float(size) for size in sizes]
    known = sorted(seconds)
    times = np.minimum.accumulate([seconds[size] for size in reversed(known)])[::-1]
    inside = np.interp(sizes, [0, *known], [0.0, *times])
    return [
        float(time) if size <= known[-1] else times[-1] * size / known[-1]
        for size, time in zip(sizes, inside, strict=True)
    ]


def _weight_up_to(sizes: Sequence[int], weights: Mapping[int, float]) -> FloatArray:
    """Return [1 + number of sizes]: first 0, then, for each size, the sum of the weights of all
    batches that fit in this size.
    """
    dense = np.zeros(sizes[-1] + 1)
    for tokens, weight in weights.items():
        if 0 < tokens <= sizes[-1]:
            dense[tokens] += weight
    total: FloatArray = dense.cumsum()[[0, *sizes]]
    return total
